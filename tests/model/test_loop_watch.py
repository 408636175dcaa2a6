"""Loops that are ported by half are told so, once; right ones hear nothing."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autoptd
from autoptd.model.parallel_model import ParallelModel

BATCH = (torch.arange(32.0).view(8, 4) / 32, torch.arange(8) % 3)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.second(self.first(x).relu()), labels)


def said(act: Callable[[], Any]) -> list[str]:
    """The warnings of a call, by their first words; each names a line of this file."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        act()
    assert all(each.filename == __file__ for each in told), [each.filename for each in told]
    return [str(each.message).partition(":")[0] for each in told]


def made(**options: Any) -> tuple[Model, ParallelModel, torch.optim.Optimizer]:
    model = Model()
    pm = autoptd.parallelize(model, backend="local", example_inputs=BATCH, **options)
    return model, pm, pm.optimizer(torch.optim.SGD, lr=0.1)


def right(pm: ParallelModel, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(3):
        pm.step(*BATCH)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("options", [{"d": 2}, {"d": 2, "zero": 1}, {"precision": "bf16-mixed"}], ids=str)
def test_a_loop_that_calls_the_model_is_told_so_once(options: dict[str, Any]) -> None:
    model, pm, optimizer = made(**options)

    def half() -> None:
        for _ in range(3):
            model(*BATCH).backward()
            optimizer.step()
            optimizer.zero_grad()

    assert said(half) == ["optimizer.step()"]
    assert said(lambda: right(pm, optimizer)) == []
    pm.close()


def test_an_optimizer_over_the_model_is_told_that_it_steps_the_model() -> None:
    model = Model()
    pm = autoptd.parallelize(model, d=2, backend="local", example_inputs=BATCH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match=r"pm.optimizer was never called.* Remedy: opt = pm.optimizer\("):
        right(pm, optimizer)
    pm.close()


@pytest.mark.parametrize("options", [{"d": 2}, {"d": 2, "zero": 1}], ids=str)
def test_two_steps_whose_gradients_add_up_are_told_so_once(options: dict[str, Any]) -> None:
    _, pm, optimizer = made(**options)
    right(pm, optimizer)

    def accumulate() -> None:
        for _ in range(4):
            pm.step(*BATCH)

    assert said(accumulate) == ["pm.step"]
    pm.close()


def test_gradients_that_are_forgotten_by_hand_do_not_add_up() -> None:
    _, pm, optimizer = made()

    def others() -> None:
        for _ in range(2):
            pm.step(*BATCH)
            optimizer.zero_grad(set_to_none=False)
        for _ in range(3):
            pm.step(*BATCH)
            for parameter in pm.parameters():
                parameter.grad = None

    assert said(others) == []
    pm.close()


def test_gradients_of_the_users_own_are_stepped_without_a_word() -> None:
    _, pm, optimizer = made()
    for parameter in pm.parameters():
        parameter.grad = torch.ones_like(parameter)
    assert said(optimizer.step) == []
    pm.close()


def test_a_closure_makes_its_gradients_within_the_step() -> None:
    _, pm, optimizer = made(d=2)

    def closure() -> float:
        optimizer.zero_grad()
        return float(pm.step(*BATCH))

    assert said(lambda: [optimizer.step(closure), optimizer.step(closure=closure)]) == []


def test_the_state_dict_of_the_model_has_initial_weights_after_training() -> None:
    model, pm, optimizer = made()
    pm.step(*BATCH)
    assert said(model.state_dict) == []  # not trained yet
    optimizer.step()
    assert said(lambda: (pm.eval_step(*BATCH), pm.state_dict())) == []  # compiles the model again
    assert said(lambda: torch.save(model.state_dict(), io.BytesIO())) == ["model.state_dict()"]
    assert said(model.state_dict) == []  # once
    pm.close()


@pytest.mark.parametrize("shapes", [None, "exact"])
def test_the_model_computes_with_initial_weights_after_training(shapes: str | None) -> None:
    model, pm, optimizer = made(t=2, shapes=shapes)
    assert said(lambda: model(*BATCH)) == []  # not trained yet
    right(pm, optimizer)
    # What is compiled, traced again and compared calls the model too.
    assert (
        said(lambda: (pm.eval_step(*BATCH), pm.eval_step(*(x[:6] for x in BATCH)), right(pm, optimizer)))
        == []
    )

    def evaluate() -> None:
        with torch.no_grad():
            model.eval()(*BATCH)
            model(*BATCH)

    assert said(evaluate) == ["model(...)"]
    pm.close()


def test_a_model_that_is_compiled_by_torch_is_compiled_whole() -> None:
    model, pm, optimizer = made()
    right(pm, optimizer)
    assert said(lambda: torch.export.export(model, BATCH, strict=True)) == []
    pm.close()


def test_weights_that_were_brought_back_are_the_users() -> None:
    model, pm, optimizer = made()
    right(pm, optimizer)
    model.load_state_dict(pm.state_dict())
    assert said(lambda: (model.state_dict(), model(*BATCH))) == []
    pm.close()


def test_what_is_pickled_knows_nothing_of_it_and_copies_may_be_called() -> None:
    model, pm, optimizer = made()
    right(pm, optimizer)
    stored = pickle.dumps(model)
    assert b"autoptd" not in stored.replace(__name__.encode(), b"")
    loaded, late = pickle.loads(stored), copy.deepcopy(model)
    assert (
        said(lambda: (loaded.state_dict(), loaded(*BATCH), loaded(*BATCH), late(*BATCH), late(*BATCH))) == []
    )
    assert said(pickle.loads(pickle.dumps(late)).state_dict) == []
    pm.close()
    assert model._state_dict_pre_hooks and model._forward_pre_hooks
    del pm, optimizer
    gc.collect()
    assert not model._state_dict_pre_hooks and not model._forward_pre_hooks
