"""A second trace, which takes over what the first has found out, is the graph of a first one, or is refused with its words."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph
from torch.utils.checkpoint import checkpoint

from autoptd import trace
from autoptd.errors import AutoptdError
from autoptd.ir.notes import note, ops

FEW, MANY = 2, 6
ONES, TWOS = torch.ones(5), torch.full((5,), 2.0)
Forward = Callable[["Net", Tensor], Tensor]


class Net(nn.Module):
    """Two layers, one of them under two names, a buffer, and a forward of one's own."""

    def __init__(self, forward_of: Forward) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
        self.tied = self.first
        self.table: Tensor
        self.register_buffer("table", torch.arange(40.0).reshape(8, 5))
        self.forward_of, self.calls = forward_of, 0

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_of(self, x).mean()


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * gradient


class Uneven(torch.autograd.Function):
    """Its backward is that of its forward for few rows only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return (3 if is_many(gradient) else 2) * gradient


def is_many(x: Tensor) -> bool:
    return x.shape[0] > FEW


def no_grad_region(self: Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = self.first(x).exp()
    return self.second(x) * scale + scale


def in_place(self: Net, x: Tensor) -> Tensor:
    h = self.first(x)
    h[:, 1:] = h[:, :-1] * 2
    return h.add_(1).relu_()


def pieces(self: Net, x: Tensor) -> Tensor:
    a, b = self.first(x).split([2, 3], dim=1)
    return a.sum(1) + b.max(1).values


# The forward does the same with more rows, but for numbers and sizes.
SAME: dict[str, Forward] = {
    "layers": lambda self, x: self.tied(self.second(self.first(x).relu())),
    "a region without gradients": no_grad_region,
    "writes in place": in_place,
    "pieces": pieces,
    "a buffer of other rows": lambda self, x: self.first(x) + self.table[: x.shape[0]],
    "positions": lambda self, x: self.first(x) * torch.arange(x.shape[0])[:, None],
    "a size": lambda self, x: self.first(x).reshape(x.shape[0] * 5),
    "a division by the rows": lambda self, x: self.first(x) / x.shape[0],
    "a constant of the rows": lambda self, x: self.first(x) / torch.tensor(float(x.shape[0])),
    "a constant found outside": lambda self, x: self.first(x) * (TWOS if is_many(x) else ONES),
    "another dtype": lambda self, x: self.first(x).to(torch.float64 if is_many(x) else torch.float16),
    "dropout": lambda self, x: F.dropout(self.first(x), 0.5),
    "a detach": lambda self, x: self.first(x) * self.second(x).detach() + x.detach(),
    "a function of autograd": lambda self, x: Double.apply(self.first(x)),
    "a checkpoint": lambda self, x: checkpoint(self.first, x, use_reentrant=False),
    "a cast": lambda self, x: self.first(x).double().float(),
}


def swallowed(self: Net, x: Tensor) -> Tensor:
    h = self.first(x)
    try:
        h = h.sin() if is_many(x) else h.cos()
    except BaseException:
        return h.cos()
    return h


def without_gradients_of_many(self: Net, x: Tensor) -> Tensor:
    with torch.set_grad_enabled(not is_many(x)):
        h = self.first(x)
    return self.second(h)


def autocast_of_many(self: Net, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=is_many(x)):
        return self.first(x)


def counted(self: Net, x: Tensor) -> Tensor:
    self.calls += is_many(x)
    return self.first(x) * (1.0 if self.calls < 31 else 2.0)


def written(self: Net, x: Tensor) -> Tensor:
    h, other = self.first(x), self.second(x)
    (other if is_many(x) else h).mul_(3)
    return h + other


def hooked(self: Net, x: Tensor) -> Tensor:
    h = self.first(x)
    if is_many(x):
        h.register_hook(lambda gradient: 2 * gradient)
    return h


# The forward does something else with more rows.
OTHER: dict[str, Forward] = {
    "another operator": lambda self, x: self.first(x).sin() if is_many(x) else self.first(x).cos(),
    "one more": lambda self, x: self.first(x).sin().cos() if is_many(x) else self.first(x).sin(),
    "one less": lambda self, x: self.first(x).sin() if is_many(x) else self.first(x).sin().cos(),
    "one for each row": lambda self, x: torch.stack([self.first(row) for row in x]),
    "a write": lambda self, x: self.first(x).mul_(2) if is_many(x) else self.first(x),
    "a write to another value": written,
    "another parameter": lambda self, x: (
        (self.second if is_many(x) else self.first)(x) + self.second(x).sin()
    ),
    "operands the other way": lambda self, x: (
        self.first(x) - self.second(x).sin() if is_many(x) else self.second(x).sin() - self.first(x)
    ),
    "another result": lambda self, x: (self.first(x), self.first(x).sin())[is_many(x)],
    "an operand that is a number": lambda self, x: self.first(x) * (2.0 if is_many(x) else ONES),
    "an exception, caught": swallowed,
    "no gradients": without_gradients_of_many,
    "autocast": autocast_of_many,
    "True instead of 1": lambda self, x: self.first(x) + (True if is_many(x) else 1),
    "a number that is a whole one": lambda self, x: self.first(x) * (2 if is_many(x) else 2.0),
    "a read that nobody reads": lambda self, x: self.first(x) + (is_many(x) and x.sum() * 0 is None),
    "a failure": lambda self, x: self.first(x) + self.table[: min(x.shape[0], 3)],
    "a hook": hooked,
    "another backward": lambda self, x: Uneven.apply(self.first(x)),
    "sizes that change in place": lambda self, x: self.first(x).t_(),
    "a call of autograd": lambda self, x: Double.apply(self.first(x)) if is_many(x) else 2.0 * self.first(x),
}


def traced(net: Net, again: bool) -> list[Any]:
    """What a trace of many rows says, line by line, or how it fails."""
    call, few = (torch.randn(MANY, 5),), (torch.randn(FEW, 5),)
    first = trace.capture(net, few, {}, None)
    try:
        capture = partial(trace.capture_again, first) if again else trace.capture
        made = capture(net, call, {}, None)
    except AutoptdError as error:
        return [str(error)]
    return lines(made if isinstance(made, Graph) else made.graph)


def lines(graph: Graph) -> list[Any]:
    found: list[Any] = []
    for node in graph.nodes:
        values = node.meta.get("val")
        pieces = values if isinstance(values, (list, tuple)) else [values]
        sizes = [(tuple(piece.shape), piece.dtype) for piece in pieces if isinstance(piece, Tensor)]
        record, constant = note(node), note(node).origin.constant
        numbers = None if constant is None else constant.tolist()
        call = (node.op, str(node.target), str(node.args), str(node.kwargs))
        found.append((call, sizes, numbers, record.kind, record.name, record.code, record.needs_grad))
    return found


@pytest.mark.parametrize("kind", [*SAME, *OTHER])
def test_it_is_the_graph_of_a_first_trace(kind: str) -> None:
    forward = (SAME | OTHER)[kind]
    assert traced(Net(forward), again=True) == traced(Net(forward), again=False)


@pytest.mark.parametrize("kind", SAME)
def test_operators_are_the_same_with_other_rows(kind: str) -> None:
    net = Net(SAME[kind])
    first = trace.capture(net, (torch.randn(FEW, 5),), {}, None)
    again = trace.capture_again(first, net, (torch.randn(MANY, 5),), {}, None)
    assert [node.target for node in ops(again)] == [node.target for node in ops(first.graph)]


def test_a_backward_for_few_rows_is_one_operator_there() -> None:
    assert any(
        "autoptd_functions.Uneven" in str(line) for line in traced(Net(OTHER["another backward"]), again=True)
    )


def test_state_that_only_many_rows_change_is_refused() -> None:
    net = Net(counted)
    assert "is changed by the forward" in traced(net, again=True)[0]
    assert net.calls == 0


def test_inference_mode_is_refused() -> None:
    """Its results cannot be saved for backward, which fake tensors do not notice."""

    def forward(self: Net, x: Tensor) -> Tensor:
        with torch.inference_mode():
            scale = x.cos()
        return self.first(x) + scale

    with pytest.raises(AutoptdError, match=r"aten\.cos is called in inference mode"):
        trace.capture(Net(forward), (torch.randn(FEW, 5),), {}, None)
