"""Batch norms in 16 bits: training is as near to float64 as a loop on one device is, running statistics included."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoptd
from autoptd.errors import PlanError

BF16 = torch.bfloat16
LR, STEPS = 0.1, 2
# Where a ReLU meets zero, one of the two has another gradient than float64: neither is often further off by more.
FACTOR, ROUNDING = 2.0, 2.0**-9


class Normed(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers, nn.ReLU(), nn.Flatten(), nn.LazyLinear(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.layers(x).float(), y.float())


KINDS = {
    "linear": (lambda: Normed(nn.Linear(8, 16), nn.BatchNorm1d(16)), (8,)),
    "convolution": (lambda: Normed(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)), (3, 6, 6)),
}


def model_of(kind: str, seed: int, dtype: torch.dtype) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(seed)
    make, size = KINDS[kind]
    model = make()
    data = [(torch.randn(8, *size), torch.randn(8, 4)) for _ in range(STEPS)]
    model(*data[0])
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.reset_running_stats()
    return model, [(x.to(dtype), y.to(dtype)) for x, y in data]


def by_hand(model: nn.Module, data: list[tuple[Tensor, Tensor]], precision: str | None) -> dict[str, Tensor]:
    """The state after steps on one device: `precision` "bf16" has float32 masters."""
    narrow = copy.deepcopy(model).to(BF16) if precision == "bf16" else copy.deepcopy(model)
    if precision is None:
        narrow.double()
    masters = {
        name: x.detach().to(torch.promote_types(x.dtype, torch.float32))
        for name, x in model.named_parameters()
    }
    if precision is None:
        masters = {name: x.double() for name, x in masters.items()}
    for x, y in data:
        with torch.autocast("cpu", BF16, enabled=precision == "bf16-mixed"):
            loss = narrow(x, y) if precision else narrow(x.double(), y.double())
        loss.backward()
        with torch.no_grad():
            for name, parameter in narrow.named_parameters():
                masters[name] = masters[name] - LR * parameter.grad.to(masters[name])
                parameter.copy_(masters[name])
                parameter.grad = None
    return {**narrow.state_dict(), **masters}


def train(model: nn.Module, data: list[tuple[Tensor, Tensor]], **keywords: Any) -> dict[str, Tensor]:
    pm = autoptd.parallelize(model, backend="local", timeout=30, example_inputs=data[0], **keywords)
    optimizer = pm.optimizer(torch.optim.SGD, lr=LR)
    for call in data:
        pm.step(*call)
        optimizer.step()
        optimizer.zero_grad()
    state = pm.state_dict()
    pm.close()
    return state


def errors(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    return {
        name: float((found[name].double() - x).abs().max() / x.abs().max().clamp(min=1e-6))
        for name, x in exact.items()
        if x.is_floating_point()
    }


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("precision", ["bf16", "bf16-mixed"])
@pytest.mark.parametrize("kind", KINDS)
def test_replicas_are_as_near_to_float64_as_one_device(kind: str, precision: str, zero: int) -> None:
    dtype = BF16 if precision == "bf16" else torch.float32
    met: dict[str, list[tuple[float, float]]] = {}
    for seed in range(3):
        model, data = model_of(kind, seed, dtype)
        state = train(model, data, precision=precision, d=2, zero=zero)
        assert int(state["layers.1.num_batches_tracked"]) == STEPS
        exact = by_hand(model, data, None)
        ours, theirs = errors(state, exact), errors(by_hand(model, data, precision), exact)
        for name in ours:
            met.setdefault(name, []).append((ours[name], theirs[name]))
    for name, pairs in met.items():
        one, other = min(pairs, key=lambda pair: pair[0] - FACTOR * pair[1])
        assert one <= max(ROUNDING, FACTOR * other), name


def test_microbatches_have_no_statistics_of_the_batch() -> None:
    model, data = model_of("linear", 0, BF16)
    with pytest.raises(PlanError, match="means over the whole batch"):
        train(model, data, precision="bf16", d=2, num_microbatches=2)
