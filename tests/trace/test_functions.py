"""Custom autograd functions: those whose backward is the derivative of their forward are traced, all others are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoptd import trace
from autoptd.errors import TraceError

X = torch.randn(4, 6)
WEIGHT = nn.Parameter(torch.randn(6))


class Net(nn.Module):
    def __init__(self, function: Any, *more: Any) -> None:
        super().__init__()
        self.layer, self.function, self.more = nn.Linear(6, 6), function, more

    def forward(self, x: Tensor) -> Tensor:
        return self.function.apply(self.layer(x), *self.more).square().sum()


class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.factor = factor
        return factor * x**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return 3 * ctx.factor * x**2 * grad, None


class Split(torch.autograd.Function):
    """Of the newer kind: the context is filled apart."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.exp()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return ctx.saved_tensors[0] * grad


@pytest.mark.parametrize("model", [Net(Cubed, 0.5), Net(Split)])
def test_a_true_derivative_is_traced(model: nn.Module) -> None:
    found = trace.capture(model, (X,), {}, None)
    trace.compare(model, None, found.graph, found.buffers, (X,), {})


def test_large_arguments_are_tried_in_small() -> None:
    model = Net(Cubed, 0.5)
    model.layer = nn.Linear(6, 1 << 12, device="meta")
    trace.capture(model, (torch.empty(1 << 11, 6, device="meta"),), {}, None)


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


class Clipped(StraightThrough):
    """The derivative, but for large gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.square()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad.clamp(-1e-3, 1e-3)


class Closed(StraightThrough):
    """Reads a parameter that its backward gives no gradient to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * WEIGHT

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * WEIGHT


class Dirty(StraightThrough):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(1.0)


class Mean(StraightThrough):
    @staticmethod
    def forward(ctx: Any, x: Tensor, of: Any) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None


@pytest.mark.parametrize(
    ("model", "fact"),
    [
        (Net(StraightThrough), "not the derivative"),
        (Net(Clipped), "not the derivative"),
        (Net(Dirty), "mark_dirty"),
        (Net(Mean, torch.zeros(2, dtype=torch.int64)), "not floats"),
        (Net(Mean, nn.Linear(2, 2)), "takes a Linear"),
    ],
)
def test_others_are_refused(model: nn.Module, fact: str) -> None:
    with pytest.raises(TraceError, match=fact) as caught:
        trace.capture(model, (X,), {}, None)
    assert model.function.__name__ in caught.value.site


def test_a_parameter_from_outside_is_refused() -> None:
    with pytest.raises(TraceError, match="no registered parameter"):
        trace.capture(Net(Closed), (X,), {}, None)
