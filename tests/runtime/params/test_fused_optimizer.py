"""Torch's fused optimizers are the default, and right whatever the strides of parameters, gradients and loaded state are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import autoptd
from autoptd.runtime.params.optimizer import takes_fused
from tests.parity.models import batch, gpt


@pytest.mark.parametrize(
    ("cls", "groups", "device", "expected"),
    [
        (optim.AdamW, [{}], "cpu", True),
        (optim.SGD, [{"lr": 0.1, "momentum": 0.9}], "cuda", True),
        (optim.Adam, [{"lr": 0.1}, {"weight_decay": 0.1}], "cuda", True),
        (optim.AdamW, [{"foreach": True}], "cpu", False),
        (optim.AdamW, [{"fused": False}], "cuda", False),
        (optim.AdamW, [{}, {"foreach": False}], "cpu", False),
        (optim.AdamW, [{"lr": torch.tensor(0.1)}], "cpu", False),
        (optim.AdamW, [{}], "mps", False),
        (optim.RMSprop, [{}], "cuda", False),
        (type("Own", (optim.AdamW,), {}), [{}], "cpu", False),
    ],
)
def test_who_takes_the_fused_form(
    cls: type[optim.Optimizer], groups: list[dict[str, Any]], device: str, expected: bool
) -> None:
    assert takes_fused(cls, groups, torch.device(device), {torch.float32, torch.bfloat16}) == expected
    assert not takes_fused(cls, groups, torch.device(device), {torch.float32, torch.complex64})


class Strided(nn.Module):
    """A parameter that is stored transposed, in a product and alone."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(8, 6, generator=generator, dtype=torch.float64).t())
        self.scale = nn.Parameter(torch.ones(8, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return ((x @ self.weight * self.scale).tanh() ** 2).mean()


@pytest.mark.parametrize("mesh", [{}, {"d": 2}], ids=str)
@pytest.mark.parametrize("cls", [optim.AdamW, optim.SGD])
def test_strided_parameters_and_gradients_are_stepped_right(
    cls: type[optim.Optimizer], mesh: dict[str, int]
) -> None:
    x = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    model = Strided()
    pm = autoptd.parallelize(Strided(), **mesh, backend="local", example_inputs=(x,))
    keywords = {"momentum": 0.9} if cls is optim.SGD else {"weight_decay": 0.1}
    ours, plain = (
        pm.optimizer(cls, lr=0.1, **keywords),
        cls(model.parameters(), lr=0.1, foreach=False, **keywords),
    )
    assert all(group["fused"] for group in ours.param_groups)
    for number in range(4):
        pm.step(x)
        model(x).backward()
        for one in (
            pm.parameters() if number else ()
        ):  # a user's own change of gradients may lay them out otherwise
            if one.dim() == 2 and one.grad is not None:
                one.grad = (2 * one.grad).t().contiguous().t()
        if number and model.weight.grad is not None:
            model.weight.grad *= 2
        ours.step()
        plain.step()
        ours.zero_grad()
        plain.zero_grad()
    for name, found in pm.state_dict().items():
        torch.testing.assert_close(found, model.state_dict()[name], rtol=1e-12, atol=1e-13)


def test_loaded_state_may_be_strided() -> None:
    """What a checkpoint holds is laid out as the optimizer that saved it had it."""
    found = []
    for is_strided in (False, True):
        pm = autoptd.parallelize(gpt(2).double(), backend="local", example_inputs=batch())
        optimizer = pm.optimizer(optim.AdamW, lr=1e-2)
        pm.step(*batch())
        optimizer.step()
        saved = optimizer.state_dict()
        for record in saved["state"].values() if is_strided else ():
            for key, value in record.items():
                record[key] = value.t().contiguous().t() if value.dim() == 2 else value
        optimizer.load_state_dict(saved)
        pm.step(*batch())
        optimizer.step()
        found.append(pm.state_dict())
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_the_users_choice_stays() -> None:
    pm = autoptd.parallelize(gpt(2), t=2, backend="local", example_inputs=batch())
    for keywords in ({"foreach": True}, {"fused": False}, {"foreach": False}):
        assert not any(group["fused"] for group in pm.optimizer(optim.AdamW, **keywords).param_groups)
