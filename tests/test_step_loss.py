"""The loss of a step: a number like any other, but where a loop takes it for the output of a model."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import autoptd

X = torch.ones(2, 4)


@pytest.fixture(scope="module")
def loss() -> torch.Tensor:
    pm = autoptd.parallelize(
        nn.Linear(4, 4),
        backend="local",
        loss_fn=nn.functional.mse_loss,
        example_inputs={"input": X, "targets": X},
    )
    made = pm.step(input=X, targets=X)
    pm.close()
    return made


BACKWARD: list[Callable[[Any], Any]] = [
    lambda loss: loss.backward(),
    lambda loss: (loss / 4).backward(),
    lambda loss: (0.5 * loss.mean() + 1).backward(),
    lambda loss: torch.amp.GradScaler("cpu").scale(loss).backward(),
]


@pytest.mark.parametrize("act", BACKWARD)
def test_a_backward_that_was_left_is_told_that_it_has_run(
    loss: torch.Tensor, act: Callable[[Any], Any]
) -> None:
    with pytest.raises(
        autoptd.PlanError, match=r"^loss.backward\(\): pm.step has run .* Remedy: leave it out: "
    ):
        act(loss)


def test_an_output_that_is_not_there_is_told(loss: torch.Tensor) -> None:
    with pytest.raises(autoptd.PlanError, match=r"^pm.step: returns the loss alone"):
        _, _ = loss
    with pytest.raises(autoptd.PlanError, match=r"^pm.step: returns the loss alone"):
        loss[1]
    with pytest.raises(autoptd.PlanError, match=r"pm.step\(...\).loss: pm.step returns the loss alone"):
        loss.loss  # type: ignore[attr-defined]  # noqa: B018
    assert loss[None].shape == (1,) and loss[...] == loss
    assert not hasattr(loss, "logits") and not hasattr(loss, "nothing")


def test_everything_else_is_a_plain_number(loss: torch.Tensor) -> None:
    plain = torch.tensor(loss.item())
    assert repr(loss) == repr(plain) and f"{loss:.3f}" == f"{plain:.3f}" and float(loss) == float(plain)
    assert not loss.requires_grad and loss == plain and loss.numpy() == plain.numpy()
    stored = io.BytesIO()
    torch.save({"loss": loss}, stored)
    stored.seek(0)
    for each in (
        torch.load(stored)["loss"],
        pickle.loads(pickle.dumps(loss)),
        copy.deepcopy(loss),
        loss.exp().log(),
    ):
        assert type(each) is torch.Tensor
        torch.testing.assert_close(each, plain)
    assert type(torch.stack([loss, plain])) is torch.Tensor
    # With what has a gradient, it is a constant.
    weight = torch.ones((), requires_grad=True)
    (loss * weight).backward()
    assert weight.grad == plain
    total = torch.zeros(())
    total += loss
    assert type(total) is torch.Tensor and total == plain


def test_loggers_know_it_for_a_tensor(loss: torch.Tensor) -> None:
    assert f"{type(loss).__module__}.{type(loss).__name__}" == "torch.StepLossTensor"
