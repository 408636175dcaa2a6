"""An auxiliary loss of every microbatch: the mean of what each computes of its own rows."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import autoptd
from benchmarks.lib.loss_cases import CASES, Case, Model
from benchmarks.losses import MACHINE, MESHES
from tests.parity.checks import check_is_found

Balance = Callable[[Tensor, Tensor], Tensor]
LARGE = "t=2 p=2 d=2 m=2"


def switch(probs: Tensor, labels: Tensor) -> Tensor:
    """Of the Switch transformer: a product of two means."""
    chosen = F.one_hot(probs.argmax(-1), 4).to(probs.dtype)
    return 4 * (chosen.mean(0) * probs.mean(0)).sum()


def over_labels(probs: Tensor, labels: Tensor) -> Tensor:
    """A masked mean over a microbatch's own number of labels, squared; and an entropy of a mean."""
    mask = (labels.flatten() != -100).to(probs.dtype)
    mean = (probs * mask[:, None]).sum(0) / mask.sum().clamp(min=1)
    return (
        mean.square().sum()
        - (mean * mean.log()).sum()
        + F.nll_loss(probs.log(), labels.flatten() % 4).square()
    )


BALANCES = {"switch": switch, "over_labels": over_labels}


def case_of(balance: Balance, mark: Callable[[Tensor], Tensor] = autoptd.per_microbatch) -> Case:
    def loss(model: Model, ids: Tensor, labels: Tensor) -> Tensor:
        hidden = model.decoder(ids)
        probs = model.heads["router"](hidden).flatten(0, 1).softmax(-1)
        plain = F.cross_entropy(model.lm_head(hidden).flatten(0, 1), labels.flatten())
        return plain + 0.1 * mark(balance(probs, labels))

    return Case(loss, "", CASES["load_balancing"].inputs, ("router",))


def check(case: Case, **mesh: Any) -> None:
    autoptd.verify(case.make(), example_inputs=case.call(), steps=2, machine=MACHINE, **mesh)


@pytest.mark.parametrize("name", BALANCES)
@pytest.mark.parametrize("mesh", [LARGE, "m=4", pytest.param("d=2", marks=pytest.mark.thorough)])
def test_it_is_the_mean_over_microbatches(name: str, mesh: str) -> None:
    check(case_of(BALANCES[name]), **MESHES[mesh])


def test_in_one_microbatch_it_is_the_loss_itself() -> None:
    case = case_of(switch)
    model, call = case.make(), case.call()
    plain = case_of(switch, mark=lambda x: x)
    assert torch.equal(model(**call), plain.make()(**call))
    check(case, t=2, num_microbatches=1)


@pytest.mark.thorough
def test_the_sum_in_place_of_the_mean_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of(switch)
    text = autoptd.compile(case.make(), num_microbatches=4, example_inputs=case.call()).sources["stage_0.py"]
    (share,) = re.findall(r"\w+ / 4\n", text)
    asked = {"num_microbatches": 4, "example_inputs": case.call(), "machine": MACHINE}
    check_is_found(monkeypatch, (share, share.replace(" / 4", "")), case.make(), **asked)


def test_what_cannot_be_marked_is_refused() -> None:
    def of_every_row(probs: Tensor, labels: Tensor) -> Tensor:
        return probs.mean(-1)

    with pytest.raises(autoptd.PlanError, match="the marked value carries the batch"):
        check(case_of(of_every_row, lambda x: autoptd.per_microbatch(x).mean()), num_microbatches=2)
    with pytest.raises(autoptd.PlanError, match="the marked value is also read elsewhere"):
        check(
            case_of(lambda probs, labels: probs.square().mean(), lambda x: autoptd.per_microbatch(x) + x),
            num_microbatches=2,
        )


def test_rows_that_meet_each_other_are_none_of_a_microbatch() -> None:
    """A matrix product of rows with rows has the batch twice: marked or not, it takes one microbatch."""
    with pytest.raises(autoptd.PlanError, match="mixes the samples"):
        check(case_of(lambda probs, labels: (probs @ probs.T).square().mean()), num_microbatches=2)
