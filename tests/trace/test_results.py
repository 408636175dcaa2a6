"""A trace with remembered results is the trace in which every operator runs, whatever a model asks of its tensors."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from autoptd import trace
from autoptd.errors import AutoptdError
from autoptd.trace.results import Results
from tests.trace.test_other_rows import lines

LAYERS = 4
Layer = Callable[["Block", Tensor], Tensor]


class Block(nn.Module):
    """One layer of several, which may ask for its number."""

    def __init__(self, layer: Layer, number: int) -> None:
        super().__init__()
        self.first, self.second, self.layer = nn.Linear(6, 6), nn.Linear(6, 6), layer
        self.number = number

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self, x)


class Net(nn.Module):
    def __init__(self, layer: Layer) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(layer, number) for number in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Straight(torch.autograd.Function):
    """Twice the value, and a gradient that its forward does not have: one operator."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return 3 * gradient


class Doubling(TorchDispatchMode):
    """A mode of the model's own, which sees operators below autograd."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return made.double() if func is torch.ops.aten.sin.default else made


def attention(self: Block, x: Tensor) -> Tensor:
    q = self.first(x).view(2, -1, 2, 3).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q).transpose(1, 2).reshape(x.shape) + x


def attention_by_kernel(self: Block, x: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH if self.number == 2 else SDPBackend.FLASH_ATTENTION):
        return attention(self, x)


def pieces(self: Block, x: Tensor) -> Tensor:
    a, b = self.first(x).split([2, 4], -1)
    return torch.cat([b, a], -1).contiguous() + self.second(x)


def written_by_pieces(self: Block, x: Tensor) -> Tensor:
    table = torch.zeros(2, 5, 6)
    table[:, 1:] = self.first(x)[:, :-1]
    return Straight.apply(table[:, :]) + x  # type: ignore[no-any-return]


def in_place(self: Block, x: Tensor) -> Tensor:
    h = self.first(x)
    return h.relu_().mul_(2).add_(x)


def in_place_after_a_view(self: Block, x: Tensor) -> Tensor:
    h = self.first(x)
    half = h[..., :3]
    h += 1
    return h * half.sum(-1, keepdim=True)


def asks_requires_grad(self: Block, x: Tensor) -> Tensor:
    with torch.no_grad():
        h = self.first(x)
    return self.second(x) + (h if h.requires_grad else h.sin()) * (2 if self.second(x).requires_grad else 3)


def asks_for_the_leaf(self: Block, x: Tensor) -> Tensor:
    h = self.first(x)
    return h.sin() if h.is_leaf else h.cos()


def asks_for_the_gradient_function(self: Block, x: Tensor) -> Tensor:
    h = self.first(x).sin()
    return h * (2.0 if "Sin" in str(h.grad_fn) else 3.0)


def asks_for_the_base(self: Block, x: Tensor) -> Tensor:
    h = self.first(x)
    return h * (2.0 if h.view(-1)._base is not None else 3.0)


def asks_in_vain(self: Block, x: Tensor) -> Tensor:
    h = self.first(x)
    try:
        return h * (2.0 if h.view(-1)._is_view() else 3.0)
    except BaseException:
        return h * 5.0


def is_itself(self: Block, x: Tensor) -> Tensor:
    h = self.first(x)
    same = (
        h.contiguous() is h,
        h.to(h.dtype) is h,
        F.dropout(h, 0.0, False) is h,
        h.t_ is h,
        h.view(h.shape) is h,
    )
    return h * (1 + sum(same))


def dtypes(self: Block, x: Tensor) -> Tensor:
    h = self.first(x)
    kind = torch.get_default_dtype()
    try:
        if self.number == 2:
            torch.set_default_dtype(torch.float64)
        return h + (torch.arange(6) / 2).sum().to(h.dtype) + (h.argmax(-1, keepdim=True) / 3).to(h.dtype)
    finally:
        torch.set_default_dtype(kind)


def true_or_one(self: Block, x: Tensor) -> Tensor:
    number: Any = (1, 1.0, True, 1)[self.number]
    return (self.first(x).argmax(-1, keepdim=True) * number).float() + self.second(x)


def a_mode_of_its_own(self: Block, x: Tensor) -> Tensor:
    h = self.first(x).sin()
    with Doubling():
        return self.second(h).sin().float()


def a_function(self: Block, x: Tensor) -> Tensor:
    with torch.set_grad_enabled(self.number != 1):
        h = self.first(x)
    return Straight.apply(h) + x  # type: ignore[no-any-return]


def expanded(self: Block, x: Tensor) -> Tensor:
    wide = self.first(x)[:, None].expand(-1, 3, -1, -1)
    return wide.transpose(1, 2).reshape(2, 5, 18)[..., 3:9] + x


def experts(self: Block, x: Tensor) -> Tensor:
    value, kind = self.first(x).topk(2, -1)
    return torch.zeros_like(x).scatter(-1, kind, value.softmax(-1)) * self.second(x)


def a_gradient_inside(self: Block, x: Tensor) -> Tensor:
    h = self.first(x)
    (slope,) = torch.autograd.grad(h.sum(), x, create_graph=True)
    return h + slope


def without_a_number(self: Block, x: Tensor) -> Tensor:
    h = self.first(x)
    return h[h[:, :, 0] > 0].sum() + x if self.number == 3 else h


ALIKE = (attention, attention_by_kernel, pieces, in_place, asks_requires_grad, is_itself, dtypes, true_or_one)
ALIKE += (a_mode_of_its_own, expanded, experts, without_a_number, asks_for_the_leaf)
OBSERVING = (written_by_pieces, in_place_after_a_view, asks_for_the_gradient_function)
OBSERVING += (asks_for_the_base, asks_in_vain, a_gradient_inside, a_function)


def traced(monkeypatch: pytest.MonkeyPatch, layer: Layer, run_all: bool) -> tuple[list[Any], bool]:
    """The lines of a trace, or how it fails; and whether all operators have run at its end."""
    made: list[Results] = []

    def results() -> Results:
        made.append(Results())
        made[-1].run_all = run_all
        return made[-1]

    # The package has a function of the module's name.
    monkeypatch.setattr(importlib.import_module("autoptd.trace.capture"), "Results", results)
    try:
        found = lines(trace.capture(Net(layer), (torch.ones(2, 5, 6),), {}, None).graph)
    except AutoptdError as error:
        found = [str(error)]
    return found, made[-1].run_all


@pytest.mark.parametrize("layer", ALIKE + OBSERVING, ids=lambda layer: layer.__name__)
def test_a_trace_is_that_of_operators_that_run(monkeypatch: pytest.MonkeyPatch, layer: Layer) -> None:
    found, has_run_all = traced(monkeypatch, layer, run_all=False)
    assert found == traced(monkeypatch, layer, run_all=True)[0]
    assert has_run_all == (layer in OBSERVING)


def test_operators_of_equal_layers_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    learned: list[str] = []
    learn = Results._learn

    def learning(self: Results, key: Any, operands: Any, made: Any) -> Any:
        learned.append(str(key[0]))
        return learn(self, key, operands, made)

    monkeypatch.setattr(Results, "_learn", learning)
    trace.capture(Net(attention), (torch.ones(2, 5, 6),), {}, None)
    # In the first layer the input has no gradient, in the second one it has.
    assert learned.count("aten.linear.default") == 2
    assert learned.count("aten.scaled_dot_product_attention.default") == 1
