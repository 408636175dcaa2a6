"""Sizes that depend on the values of a tensor: one error with the operator, its line, and a form whose size is known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoptd
from autoptd import trace
from autoptd.errors import TraceError

X = torch.randn(8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.tensor([3, 1, 5, 2, 0, 4, 3, 5])
Loss = Callable[[Tensor, Tensor], Tensor]
STRAY = nn.Parameter(torch.ones(6, dtype=torch.float64))
# By the name in the error.
FORMS: dict[str, tuple[Loss, ...]] = {
    "bincount": (
        lambda h, y: (torch.bincount(y, minlength=6) * h.sum(0)).sum(),
        lambda h, y: F.cross_entropy(h, y, 1.0 / (1 + torch.bincount(y, minlength=6)).double()),
    ),
    "index": (lambda h, y: F.cross_entropy(h[y > 2], y[y > 2]), lambda h, y: h.sum() * len(h[y > 2])),
    "masked_select": (lambda h, y: h.masked_select(h > 0).mean(),),
    "nonzero": (
        lambda h, y: h[(y > 2).nonzero().squeeze(1)].sum(),
        lambda h, y: h.sum() * len((y > 2).nonzero()),
    ),
    "where": (
        lambda h, y: h[torch.where(y > 2)].sum(),
        lambda h, y: h.sum() * len(torch.where(y > 2)[0]),
    ),
    "argwhere": (lambda h, y: h[torch.argwhere(y > 2)[:, 0]].sum(),),
    "unique": (
        lambda h, y: h.sum() * y.unique(return_counts=True)[1].sum(),
        lambda h, y: h.sum() * len(torch.unique(y)),
    ),
    "repeat_interleave": (lambda h, y: h.repeat_interleave(y, 0).sum(),),
    "one_hot": (lambda h, y: (F.one_hot(y) * h).sum(),),
}


class Net(nn.Module):
    """One layer, and a loss."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.loss = nn.Linear(8, 6, dtype=torch.float64), loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.layer(x), y)


@pytest.mark.parametrize("name, loss", [(name, loss) for name, losses in FORMS.items() for loss in losses])
def test_what_has_no_known_size_is_named(name: str, loss: Loss) -> None:
    with pytest.raises(TraceError, match=f"the size of {name}'s result depends on the values") as caught:
        trace.capture(Net(loss), (X, Y), {}, None)
    assert "test_sizes.py:" in caught.value.site and "mask of fixed size" not in caught.value.remedy


@pytest.mark.parametrize(
    "loss",
    [
        lambda h, y: h[(y > 2).tolist()].sum(),
        lambda h, y: h.sum() * int(y.numpy().max()),
        lambda h, y: h[: int(y.max())].sum(),
    ],
)
def test_so_is_a_value_that_becomes_a_number(loss: Loss) -> None:
    with pytest.raises(TraceError, match="value of a tensor becomes a Python number") as caught:
        trace.capture(Net(loss), (X, Y), {}, None)
    assert "test_sizes.py:" in caught.value.site and "torch.arange(n) < length" in caught.value.remedy


def swallowed(take: Loss) -> Loss:
    """A loss that does something else where `take` fails."""

    def loss(h: Tensor, y: Tensor) -> Tensor:
        try:
            return take(h, y)
        except BaseException:
            return h.sum()

    return loss


class Scaled(torch.autograd.Function):
    """Reads state in its backward, which is refused."""

    scale = 2.0

    @staticmethod
    def forward(ctx: Any, x: Tensor, which: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return gradient * Scaled.scale, None


@pytest.mark.parametrize(
    "take, fact",
    [
        (lambda h, y: h.sum() * int(y.max()), "becomes a Python number"),
        (lambda h, y: h[y > 2].sum(), "the size of index's result"),
        (lambda h, y: h.sum() if y.max() > 2 else h.mean(), "becomes a Python number"),
        (lambda h, y: (h.register_hook(lambda g: 2 * g), h.mean())[1], "a hook in the forward"),
        (lambda h, y: (h * STRAY).sum(), "not a registered parameter"),
        (lambda h, y: Scaled.apply(h, y).sum(), "whose later values"),
    ],
)
def test_a_model_that_swallows_the_error_is_refused(take: Loss, fact: str) -> None:
    with pytest.raises(TraceError, match=fact):
        trace.capture(Net(swallowed(take)), (X, Y), {}, None)


def remedies(h: Tensor, y: Tensor) -> Tensor:
    """All that the errors propose, in one loss."""
    mask, counts, weights = y > 2, F.one_hot(y, 6).sum(0), y.double().cos()
    return sum(  # type: ignore[return-value]
        (
            F.cross_entropy(h, y, 1.0 / (1 + counts).double()),
            (h.sum(0) * (F.one_hot(y, 6) * weights[:, None]).sum(0)).sum(),
            h.sum() * (counts > 0).sum(),
            torch.where(mask[:, None], h, 0).sum() / mask.sum(),
            F.cross_entropy(h, torch.where(mask, y, -100)),
            h.sum() * mask.sum(),
            torch.where(torch.arange(6) < y[:, None], h, 0).sum(),
            h.repeat_interleave(torch.tensor([1, 2, 0, 1, 3, 1]), 1, output_size=8).square().mean(),
            h[:, torch.tensor([0, 2])].sin().sum(),
        )
    )


def test_what_the_errors_propose_works() -> None:
    model = Net(remedies)
    wanted = model(X, Y)
    wanted.backward()
    pm = autoptd.parallelize(Net(remedies), d=2, num_microbatches=2, backend="local", example_inputs=(X, Y))
    torch.testing.assert_close(pm.step(X, Y), wanted.detach(), rtol=1e-9, atol=1e-9)
    found = pm.gradients()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-9, atol=1e-9)
    pm.close()
