"""What float64 tells of a trace that differs from its model: rounding, or a fault; and what it cannot tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, Node

from autoptd import trace
from autoptd.errors import TraceError
from autoptd.ir.notes import op_name, ops
from autoptd.trace.faithful import Fault, Pair, _Exact, fault_of

BF16 = torch.bfloat16


class Normed(nn.Module):
    """A batch norm, whose trace rounds in other places than torch's operator, in front of a ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)).relu()).float().square().mean()


class Plain(nn.Module):
    """Of which every operator is traced as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return (self.last(self.first(x).tanh() * 3.0).float() + 1).square().mean()


def found_in(make: type[nn.Module], seed: int = 0) -> tuple[nn.Module, Any, Tensor]:
    torch.manual_seed(seed)
    model, x = make().to(BF16), torch.randn(8, 8, dtype=BF16)
    return model, trace.capture(model, (x,), {}, None), x


def held(model: nn.Module, found: Any, x: Tensor) -> None:
    trace.compare(model, None, found.graph, found.buffers, (x,), {})


def named(graph: Graph, name: str, number: int = 0) -> Node:
    return [node for node in ops(graph) if op_name(node) == name][number]


def is_in_float64(monkeypatch: pytest.MonkeyPatch) -> list[Pair]:
    """Notes what is run in float64."""
    met: list[Pair] = []
    in_float64 = Pair.in_float64

    def noted(self: Pair) -> Pair:
        met.append(self)
        return in_float64(self)

    monkeypatch.setattr(Pair, "in_float64", noted)
    return met


def test_a_batch_norm_in_16_bits_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of these, some differ from torch's by more than the tolerance, at a tie by much."""
    met = is_in_float64(monkeypatch)
    for seed in range(12):
        held(*found_in(Normed, seed))
    assert met


def test_running_statistics_in_16_bits_are_rounded_once_a_step() -> None:
    """From sums in float32, which are rounded themselves."""
    others, count = 0, 0
    for seed in range(8):
        model, found, x = found_in(Normed, seed)
        kept = model.norm.running_mean
        kept.normal_()
        _, updated = Pair(model, None, found.graph, found.buffers, (x,), {}).of_graph(lambda *_: None)
        exact = (kept.double() * 0.9 + model.first(x).double().mean(0) * 0.1).to(BF16)
        others += int((updated["norm.running_mean"] != exact).sum())
        count += exact.numel()
    assert others <= count / 32


def test_nothing_runs_in_float64_where_nothing_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    met = is_in_float64(monkeypatch)
    held(*found_in(Plain))
    assert not met


def scaled(name: str, factor: float) -> Callable[[Graph], None]:
    """Multiply what the first operator of a name gives."""

    def change(graph: Graph) -> None:
        node = named(graph, name)
        with graph.inserting_after(node):
            made = graph.call_function(torch.ops.aten.mul.Tensor, (node, factor))
        made.meta = dict(node.meta)
        node.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)

    return change


def without(name: str, number: int = 0) -> Callable[[Graph], None]:
    """Leave an operator out."""

    def change(graph: Graph) -> None:
        node = named(graph, name, number)
        node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
        graph.erase_node(node)

    return change


def constant(name: str) -> Callable[[Graph], None]:
    """Put numbers in the place of what an operator gives."""

    def change(graph: Graph) -> None:
        node = named(graph, name)
        shape, dtype = list(node.meta["val"].shape), node.meta["val"].dtype
        node.target, node.args, node.kwargs = torch.ops.aten.full.default, (shape, 0.5), {"dtype": dtype}

    return change


def instead(name: str, target: Any) -> Callable[[Graph], None]:
    def change(graph: Graph) -> None:
        named(graph, name).target = target

    return change


# One ulp of bfloat16 is 2**-8 to 2**-7 of a number: less than two are found wherever they show by one of the largest entry.
FAULTS: list[tuple[type[nn.Module], Callable[[Graph], None]]] = [
    (Plain, scaled("aten.tanh", 1 + 2.0**-6)),
    (Plain, scaled("aten.linear", 1 + 2.0**-6)),
    (Plain, without("aten.add")),
    (Plain, without("aten.mul")),
    (Plain, instead("aten.tanh", torch.ops.aten.sin.default)),
    (Normed, scaled("aten.rsqrt", 1 + 2.0**-6)),
    (Normed, constant("aten.rsqrt")),
    (Plain, constant("aten.tanh")),
    (Normed, instead("aten.relu", torch.ops.aten.abs.default)),
]


@pytest.mark.parametrize("number", range(len(FAULTS)))
def test_a_wrong_graph_is_still_refused(number: int) -> None:
    make, change = FAULTS[number]
    model, found, x = found_in(make)
    change(found.graph)
    with pytest.raises(TraceError, match=r"the model give different values .* in float64 as well"):
        held(model, found, x)


def test_less_than_an_ulp_is_not_looked_at() -> None:
    """The resolution: 2**-7 of the largest entry, for bfloat16."""
    model, found, x = found_in(Plain)
    scaled("aten.tanh", 1 + 2.0**-10)(found.graph)
    held(model, found, x)


class Cancelling(nn.Module):
    """A difference of two large numbers, which is taken in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = (self.first(x).float() + 64.0) - 64.0
        return self.last(h.to(BF16).tanh()).float().square().mean()


def test_a_graph_that_rounds_more_is_refused() -> None:
    """Here it is one function in float64."""
    model, found, x = found_in(Cancelling)
    cast = named(found.graph, "aten.to")
    cast.args = (cast.args[0], BF16)
    with pytest.raises(TraceError, match=r"rounds more than the model: .* both are equal.*float32"):
        held(model, found, x)


class Narrow(Plain):
    """Runs in no other dtype."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.first.weight.dtype == BF16, "weights in 16 bits are expected"
        return super().forward(x)  # type: ignore[no-any-return]


def test_what_does_not_run_in_float64_is_said_so() -> None:
    model, found, x = found_in(Narrow)
    held(model, found, x)
    scaled("aten.tanh", 2.0)(found.graph)
    with pytest.raises(TraceError, match=r"AssertionError: weights in 16 bits.*let the model run in float64"):
        held(model, found, x)


def test_a_model_of_many_weights_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autoptd.trace.faithful.MOST_ENTRIES", 10)
    model, found, x = found_in(Plain)
    scaled("aten.tanh", 2.0)(found.graph)
    with pytest.raises(TraceError, match="more than 10 entries"):
        held(model, found, x)


def test_a_model_under_test_is_left_as_it_was() -> None:
    model, found, x = found_in(Normed, 3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    change = scaled("aten.rsqrt", 2.0)
    change(found.graph)
    with pytest.raises(TraceError):
        held(model, found, x)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_what_only_these_weights_show_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tie: with other weights, those of a copy, there is no difference. Which CPUs meet one by themselves, differs."""
    model, found, x = found_in(Normed, 3)
    met = Fault("loss", "rounds more", "float32")
    answers: list[dict[str, Fault]] = [{"loss": met}, {"loss": met}, {}]
    monkeypatch.setattr(_Exact, "other_rounding", lambda self, pair, tolerance: answers.pop(0))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert fault_of(Pair(model, None, found.graph, found.buffers, (x,), {}), met, 1e-2, 1e-3) is None
    assert not answers
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
