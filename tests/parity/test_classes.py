"""Losses over a vocabulary that is split over tp: equal to one device, and a few numbers a token on the wire."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import autoptd
from benchmarks import losses
from benchmarks.lib.loss_cases import CASES, LENGTH, ROWS, Case, Model
from benchmarks.losses import LARGE_VOCAB, MACHINE, loss_bytes
from tests.parity.checks import as_planned

# What is made of the logits by log_softmax, softmax, logsumexp, gather or argmax.
OVER_CLASSES = (
    "zloss soft_labels distillation nll entropy_bonus policy_clip grpo_masked dpo_halves focal".split()
)


def smoothed(model: Model, ids: Tensor, labels: Tensor) -> Tensor:
    """Label smoothing written out, weighed by whether the model is right: argmax without a gradient."""
    logits = model.logits(ids)
    log_p = logits.log_softmax(-1)
    picked = log_p.gather(-1, labels[..., None]).squeeze(-1)
    wrong = (logits.argmax(-1) != labels).to(log_p.dtype)
    return -((0.9 * picked + 0.1 * log_p.mean(-1)) * (1 + wrong)).mean()


def to_reference(model: Model, ids: Tensor, teacher: Tensor) -> Tensor:
    """KL to a reference, of probabilities, in another order of dims."""
    p = model.logits(ids).transpose(1, 2).softmax(1)
    q = teacher.transpose(1, 2).log_softmax(1)
    return (p * ((p + 1e-6).log() - q)).sum(1).mean() + p.logsumexp(1, keepdim=True).mean()


def with_temperature(model: Model, ids: Tensor, teacher: Tensor) -> Tensor:
    """Reverse KL of probabilities at a temperature: one device has the quotient and its softmax in one operator."""
    p = (model.logits(ids) / 2).softmax(-1)
    return (p * ((p + 1e-6).log() - (teacher / 2).log_softmax(-1))).sum(-1).mean()


OTHERS = {
    "with_temperature": Case(with_temperature, "", CASES["distillation"].inputs),
    "smoothed": Case(smoothed, "", CASES["div_numel"].inputs),
    "to_reference": Case(to_reference, "", CASES["distillation"].inputs),
}
EVERY = {name: CASES[name] for name in OVER_CLASSES} | OTHERS


@pytest.mark.parametrize("name", EVERY)
def test_logits_are_never_gathered(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most eight numbers of 4 bytes a token go over tp for a loss; its logits are 131,072 bytes a token."""
    # A narrow head: what is sent is of tokens and classes.
    monkeypatch.setattr(losses, "LARGE_WIDTH", 64)
    found = loss_bytes(EVERY[name])
    assert found is not None and 0 < found["a token"] <= 8 * 4
    assert found["logits a token"] == LARGE_VOCAB * 4


@pytest.mark.parametrize("name", OTHERS)
def test_other_losses_over_classes_are_those_of_one_device(name: str) -> None:
    check(name, t=2)


@pytest.mark.thorough
@pytest.mark.parametrize("name", OTHERS)
def test_that_is_found_out_of_the_logits_in_shards(name: str) -> None:
    case = EVERY[name]
    program = autoptd.compile(
        case.make(), t=2, machine=MACHINE, num_microbatches=2, example_inputs=case.call()
    )
    text = program.sources["stage_0.py"]
    wanted = {"smoothed": "log_softmax gather argmax", "to_reference": "softmax logsumexp"}
    assert all(f"rt.classes_{one}(" in text for one in wanted.get(name, "softmax").split())
    assert "rt.s_to_i(lm_head" not in text and "rt.s_to_r(lm_head" not in text


SETTINGS: dict[str, dict[str, Any]] = {
    "t4": {"t": 4, "num_microbatches": 2},
    "sequence parallel": {"t": 2, "sequence_parallel": True},
    "recomputed": {"t": 2, "recompute": "full", "num_microbatches": 2},
    "bf16": {"t": 2, "precision": "bf16-mixed"},
}


@pytest.mark.thorough
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize(
    "name", ["entropy_bonus", "smoothed", pytest.param("to_reference", marks=pytest.mark.thorough)]
)
def test_settings(name: str, setting: str) -> None:
    check(name, **SETTINGS[setting])


@pytest.mark.parametrize("name", ["focal", "zloss", "smoothed", "nll"])
def test_a_vocabulary_that_the_ranks_do_not_divide(name: str) -> None:
    """61 classes over 4 ranks: where cross-entropy shares the head, it is padded; else it is whole."""

    def with_labels(model: Model, ids: Tensor, **given: Any) -> Tensor:
        labels = given["labels"]
        plain = torch.nn.functional.cross_entropy(model.logits(ids).flatten(0, 1), labels.flatten())
        return EVERY[name].loss(model, ids, **given) + 0.5 * plain

    case = Case(with_labels, "", EVERY[name].inputs)
    given = {"t": 4, "machine": MACHINE, "num_microbatches": 2, "example_inputs": case.call(vocab=61)}
    autoptd.verify(case.make(vocab=61), **given, steps=2)
    text = autoptd.compile(case.make(vocab=61), **given).sources["stage_0.py"]
    assert "size=61" in text


@pytest.mark.parametrize("name", ["smoothed", "to_reference"])
def test_executed_reductions_are_those_of_the_program(name: str) -> None:
    case = EVERY[name]
    _, record = as_planned(case.make(), case.call(), t=2, d=2, num_microbatches=2, machine=MACHINE)
    for rank in range(4):
        maxima = [made for made in record.of(rank) if made.site.endswith("maximum")]
        assert {made.payload_bytes for made in maxima} == {4 * ROWS // 4 * LENGTH}


def check(name: str, **mesh: Any) -> None:
    case = EVERY[name]
    autoptd.verify(case.make(), example_inputs=case.call(), steps=2, machine=MACHINE, **mesh)
