"""Writes of a forward that are told by an operator's schema, not by its name."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import autoptd
from autoptd.errors import TraceError


@torch.library.custom_op("autoptd_tests::bump", mutates_args=("x",))
def bump(x: Tensor, by: Tensor) -> None:
    x.add_(by)


@bump.register_fake
def _(x: Tensor, by: Tensor) -> None:
    return None


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4).double()
        self.register_buffer("seen", torch.zeros(4, dtype=torch.bool))
        self.register_buffer("bits", torch.zeros(4, dtype=torch.long))
        self.register_buffer("count", torch.zeros(()).double())


class Bits(Net):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss = (self.linear(x) * torch.where(self.seen, 0.5, 1.0).double() * (1 + self.bits)).square().mean()
        self.seen |= y > 0
        self.bits ^= y.long()
        self.bits <<= 1
        return loss


class Fresh(Net):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        mask = y > 1
        other = mask
        mask |= y > 0
        return (self.linear(x) * (1 + other.double())).square().mean()


@pytest.mark.parametrize("kind", [Bits, Fresh])
def test_bits_are_written(kind: type[Net]) -> None:
    """The example changes nothing, so that the comparison with the model does not show a write that is lost."""
    torch.manual_seed(0)
    model = kind()
    own = copy.deepcopy(model)
    x = torch.randn(4, 4, dtype=torch.float64)
    ys = [torch.zeros(4), torch.tensor([1, 0, 0, 2]), torch.tensor([0, 1, 0, 1])]
    pm = autoptd.parallelize(
        model, t=2, num_microbatches=1, backend="local", example_inputs=(x, ys[0].long())
    )
    opt = pm.optimizer(torch.optim.SGD, lr=0.1)
    for y in ys:
        assert torch.allclose(pm.step(x, y.long()), own(x, y.long()).detach(), rtol=0, atol=1e-12)
        opt.zero_grad()
    found = pm.state_dict()
    assert all(torch.equal(found[name], value) for name, value in own.named_buffers())
    pm.close()


class Bump(Net):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        bump(self.count, (y > 0).sum().double())
        return (self.linear(x) * (1 + self.count)).square().mean()


class BumpFresh(Net):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = torch.zeros_like(x)
        bump(h, (y > 0).double())
        return self.linear(x + h).square().mean()


class Observer(Net):
    """What quantization-aware training looks at a value with."""

    def __init__(self) -> None:
        super().__init__()
        self.observe = torch.ao.quantization.FusedMovingAvgObsFakeQuantize()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.observe(self.linear(x).float()).square().mean() + y.sum()


@pytest.mark.parametrize(
    "kind, what",
    [(Bump, "buffer count"), (BumpFresh, "its argument x"), (Observer, r"buffer observe\..*min_val")],
)
def test_a_write_without_a_functional_form_is_refused(kind: type[Net], what: str) -> None:
    call = torch.randn(4, 4, dtype=torch.float64), torch.zeros(4, dtype=torch.long)
    with pytest.raises(TraceError, match=f"changes {what} in place"):
        autoptd.parallelize(kind(), d=1, backend="local", example_inputs=call)
