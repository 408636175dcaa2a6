"""What `pm.optimizer` takes: classes, partials, the model's own parameters and groups of them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autoptd
from autoptd.errors import PlanError
from autoptd.model.loop_watch import OwnParameters

BATCH = (torch.arange(32.0, dtype=torch.float64).view(8, 4) / 32, torch.arange(8) % 3)
AdamW = torch.optim.AdamW


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.second = nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3)
        self.frozen = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.second(self.norm(self.first(x).relu())), labels)

    def groups(self) -> list[dict[str, Any]]:
        """As `configure_optimizers` makes them: a generator among them, and what the loss does not use."""
        decayed = [x for x in self.parameters() if x.dim() == 2]
        return [
            {"params": decayed, "weight_decay": 0.5},
            {"params": (x for x in self.parameters() if x.dim() < 2), "weight_decay": 0.0, "lr": 3e-2},
        ]


ASKED: dict[str, Callable[[Model], tuple[Any, Any]]] = {
    "groups": lambda model: (partial(AdamW, lr=1e-2), model.groups()),
    "parameters": lambda model: (partial(AdamW, lr=1e-2), model.parameters()),
    "trained": lambda model: (
        partial(AdamW, lr=1e-2),
        [x for x in model.first.parameters() if x.requires_grad],
    ),
    "pairs": lambda model: (partial(AdamW, lr=1e-2, betas=(0.5, 0.9)), model.named_parameters()),
}


@pytest.mark.parametrize("options", [{"t": 2, "d": 2}, {"p": 2}, {"d": 2, "zero": 1}], ids=str)
@pytest.mark.parametrize("asked", ASKED)
def test_the_models_own_parameters_are_stepped_as_on_one_device(asked: str, options: dict[str, Any]) -> None:
    model, plain = Model().double(), Model().double()
    pm = autoptd.parallelize(model, backend="local", example_inputs=BATCH, **options)
    optimizer, own = (
        pm.optimizer(*ASKED[asked](model)),
        (lambda cls, params: cls(params))(*ASKED[asked](plain)),
    )
    for _ in range(2):
        pm.step(*BATCH)
        plain(*BATCH).backward()
        for each in (optimizer, own):
            each.step()
            each.zero_grad()
    trained = pm.state_dict()
    for name, x in plain.state_dict().items():
        torch.testing.assert_close(trained[name], x, rtol=0, atol=1e-12)
    pm.close()


def test_an_instance_is_told_as_a_call() -> None:
    model = Model().double()
    pm = autoptd.parallelize(model, backend="local", example_inputs=BATCH)
    made = AdamW(model.parameters(), lr=0.02, weight_decay=0.3)
    with pytest.raises(PlanError, match=r"pm.optimizer\(torch.optim.AdamW, lr=0.02, weight_decay=0.3\)"):
        pm.optimizer(made)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"torch.optim.SGD, lr=0.1, params=\.\.\."):
        pm.optimizer(torch.optim.SGD(model.groups(), lr=0.1))  # type: ignore[arg-type]
    for wrong, what in (
        (lambda params: AdamW(params), "a function"),
        ("AdamW", "'AdamW'"),
        (model.parameters(), "a generator"),
    ):
        with pytest.raises(PlanError, match=f"^pm.optimizer: {what} is not an optimizer class"):
            pm.optimizer(wrong)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="is not a local parameter"):
        pm.optimizer(AdamW, [torch.ones(3)], lr=0.1)
    keyword = pm.optimizer(partial(AdamW, lr=1.0), lr=0.5)
    assert keyword.param_groups[0]["lr"] == 0.5
    pm.close()


def test_names_of_a_model_do_not_keep_it_alive() -> None:
    model = Model()
    own, alive = OwnParameters(model), weakref.ref(model.first.weight)
    assert own.name_of(model.first.weight) == "first.weight"
    assert own.in_names(model.parameters(), {"first.weight"}) == ["first.weight"]  # what ranks do not have
    del model
    gc.collect()
    assert alive() is None
