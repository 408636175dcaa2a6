"""What scripts try on a `ParallelModel` and what it is not: an error that says what to call, and `hasattr` that is right."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import autoptd
from autoptd.errors import PlanError
from autoptd.model.parallel_model import INSTEAD, ParallelModel, WrongCall


@pytest.fixture(scope="module")
def pm() -> ParallelModel:
    example = {"input": torch.ones(2, 4), "targets": torch.ones(2, 2)}
    return autoptd.parallelize(nn.Linear(4, 2), backend="local", loss_fn=nn.MSELoss(), example_inputs=example)


@pytest.mark.parametrize("name", sorted(INSTEAD))
def test_what_is_tried_says_what_to_call(pm: ParallelModel, name: str) -> None:
    with pytest.raises(PlanError, match=rf"^pm\.{name}: .* Remedy: "):
        getattr(pm, name)
    assert not hasattr(pm, name) and getattr(pm, name, None) is None
    assert not hasattr(type(pm), name)  # nothing that is there is hidden


def test_a_call_is_a_step(pm: ParallelModel) -> None:
    with pytest.raises(PlanError, match=r"pm.step\(\*pm.local_batch"):
        pm(torch.ones(2, 4), torch.ones(2, 2))


def test_any_other_name_is_missing_as_everywhere(pm: ParallelModel) -> None:
    with pytest.raises(AttributeError, match="'ParallelModel' object has no attribute 'wrong'") as told:
        pm.wrong  # type: ignore[attr-defined]  # noqa: B018
    assert not isinstance(told.value, WrongCall)
    with pytest.raises(PlanError, match="copy of a ParallelModel"):
        copy.copy(pm)


def test_remedies_name_what_there_is(pm: ParallelModel) -> None:
    for remedy in INSTEAD.values():
        for word in remedy.replace("(", " ").replace(":", " ").replace(",", " ").split():
            if word.startswith("pm."):
                assert hasattr(pm, word.removeprefix("pm.").rstrip(".")), word


def test_what_is_named_for_compile_and_checkpointing_is_taken() -> None:
    example = {"input": torch.ones(2, 4), "targets": torch.ones(2, 2)}
    for name, options in (
        ("compile", {"fuse": "inductor"}),
        ("gradient_checkpointing_enable", {"recompute": "full"}),
    ):
        ((key, value),) = options.items()
        assert f"{key}={value!r}" in INSTEAD[name]
        autoptd.compile(nn.Linear(4, 2), loss_fn=nn.MSELoss(), example_inputs=example, **options)
