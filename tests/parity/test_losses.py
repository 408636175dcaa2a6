"""Losses as people write them equal one device on every mesh, or are refused with a remedy that works."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoptd
from autoptd.runtime.step.stage import load_stage
from autoptd.runtime.step.standalone import check_stage
from benchmarks.lib.loss_cases import CASES, LENGTH, VOCAB, Case, Model, log_probs, token_losses
from benchmarks.losses import MACHINE, MESHES
from tests.parity.checks import as_planned

# What mixes samples through parameters: in one microbatch, see test_mixing.py.
MIXING = ("contrastive", "load_balancing")
LARGE = "t=2 p=2 d=2 m=2"
CELLS = [(name, mesh) for name in CASES if name not in MIXING for mesh in MESHES if mesh != LARGE]


def check(case: Case, **mesh: Any) -> None:
    autoptd.verify(case.make(), example_inputs=case.call(), steps=2, **{"machine": MACHINE, **mesh})


@pytest.mark.parametrize("name", [name for name in CASES if name not in MIXING])
def test_a_loss_is_that_of_one_device_over_tensor_pipeline_and_replicas(name: str) -> None:
    check(CASES[name], **MESHES[LARGE])


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "mesh"), CELLS)
def test_a_loss_is_that_of_one_device(name: str, mesh: str) -> None:
    check(CASES[name], **MESHES[mesh])


@pytest.mark.one_in(24)
@pytest.mark.parametrize("name", [name for name in CASES if name not in MIXING])
def test_a_loss_of_divided_tokens_is_that_of_one_device(name: str) -> None:
    check(CASES[name], t=2, c=2)


@pytest.mark.parametrize(("name", "mesh"), [(MIXING[1], "m=4"), (MIXING[0], LARGE)])
def test_what_mixes_samples_is_refused_and_runs_as_the_remedy_says(name: str, mesh: str) -> None:
    with pytest.raises(autoptd.PlanError, match="or run with num_microbatches=1"):
        check(CASES[name], **MESHES[mesh])
    check(CASES[name], **{**MESHES[mesh], "num_microbatches": 1})


def whitened(model: Model, ids: Tensor, labels: Tensor, advantage: Tensor, mask: Tensor) -> Tensor:
    """A sum that is made of another one: the variance of masked advantages, then PPO's objective."""
    mean = (advantage * mask).sum() / mask.sum()
    variance = ((advantage - mean).square() * mask).sum() / (mask.sum() - 1)
    white = (advantage - mean) * torch.rsqrt(variance + 1e-8)
    return -(log_probs(model.logits(ids), labels) * white * mask).sum() / mask.sum()


def by_class(model: Model, ids: Tensor, labels: Tensor) -> Tensor:
    """A sum of several numbers: how often each label occurs in the batch."""
    often = nn.functional.one_hot(labels, VOCAB).sum((0, 1)).clamp(min=1)
    return (token_losses(model.logits(ids), labels) / often[labels]).sum() / often.numel()


def longest_mean(model: Model, ids: Tensor, labels: Tensor, lengths: Tensor) -> Tensor:
    """Lengths, a mean of them, and a number of rows that stands in the middle of an expression."""
    rows = ids.shape[0]
    mask = torch.arange(LENGTH, device=ids.device) < lengths[:, None]
    losses = token_losses(model.logits(ids), labels) * mask / rows
    return losses.sum() / lengths.float().mean() + rows * losses.square().sum()


def sum_for_another(model: Model, ids: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """A sum that nothing reads but the sum that it is a part of."""
    count = mask[:, :4].sum() + ((ids == 0).sum() + 1)
    return (token_losses(model.logits(ids), labels) * mask).sum() / count


def balanced(model: Model, ids: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """Class weights by how often classes occur, and labels left out by a mean: both are made of sums over the batch."""
    often = nn.functional.one_hot(labels, VOCAB).sum((0, 1))
    weights = (often.sum() / (often.clamp(min=1) * VOCAB)).to(model.logits(ids).dtype)
    kept = torch.where((often[labels] < 2) | (mask < mask.mean()), -100, labels)
    return nn.functional.cross_entropy(model.logits(ids).flatten(0, 1), kept.flatten(), weight=weights)


OTHERS = {
    "weights and labels made of sums": Case(balanced, "", CASES["masked_mean"].inputs),
    "a sum that only another reads": Case(sum_for_another, "", CASES["masked_mean"].inputs),
    "a sum of a sum": Case(whitened, "", {**CASES["policy_clip"].inputs, **CASES["masked_mean"].inputs}),
    "a sum of several numbers": Case(by_class, "", CASES["div_numel"].inputs),
    "lengths and rows": Case(longest_mean, "", {**CASES["div_numel"].inputs, **CASES["reward_head"].inputs}),
}
for name in ("a sum of a sum", "lengths and rows"):
    for unread in ("old", "reward"):
        OTHERS[name].inputs.pop(unread, None)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("mesh", ["m=4", LARGE])
def test_any_function_of_sums_over_inputs_may_be_used(name: str, mesh: str) -> None:
    check(OTHERS[name], **MESHES[mesh])


def test_what_losses_divide_by_is_counted_after_the_sums_that_it_reads(tmp_path: Path) -> None:
    case = OTHERS["weights and labels made of sums"]
    check(case, d=2, num_microbatches=2)
    program = autoptd.compile(case.make(), d=2, num_microbatches=2, example_inputs=case.call())
    assert autoptd.peak_memory(program)  # a rehearsal counts as well
    program.save(tmp_path)
    assert not check_stage(load_stage(program.sources["stage_0.py"], "stage_0.py"), tmp_path).wrong


def test_sums_of_inputs_are_communicated_as_the_program_says() -> None:
    case = OTHERS["a sum of a sum"]
    program, _ = as_planned(case.make(), case.call(), **MESHES[LARGE])
    rounds = [line for line in program.collectives if line.conversion == "batch sums"]
    # The sum of advantages and, three times, the number of tokens; then the sum of squares.
    assert [line.payload_bytes for line in rounds] == [32, 8]


def test_what_only_sums_read_is_not_computed_in_forward() -> None:
    case = CASES["masked_mean"]
    program = autoptd.compile(case.make(), num_microbatches=2, example_inputs=case.call())
    forward, sums = program.sources["stage_0.py"].split("def batch_sums_0")
    assert "mask.sum()" in sums
    assert "mask.sum()" not in forward and "self.batch_sum(0, dtype=torch.float32)" in forward


def test_an_evaluation_of_more_rows_divides_by_its_own_numbers() -> None:
    case = CASES["div_rows"]
    model = case.make()
    pm = autoptd.parallelize(model, d=2, num_microbatches=2, backend="local", example_inputs=case.call())
    more = case.call(rows=16)
    assert pm.eval_step(**more).item() == pytest.approx(model(**more).item(), rel=1e-5)
    pm.close()


def deviation(model: Model, ids: Tensor, labels: Tensor, advantage: Tensor) -> Tensor:
    white = (advantage - advantage.mean()) / (advantage.std() + 1e-6)
    # Around 1: the rounding of a loss near 0 would be a large part of it.
    return 1 - (log_probs(model.logits(ids), labels) * white).mean()


def over_a_tensor(model: Model, ids: Tensor, labels: Tensor) -> Tensor:
    return token_losses(model.logits(ids), labels).sum() / torch.tensor(float(ids.shape[0]))


@pytest.mark.thorough
def test_deviations_of_inputs_and_the_remedy_of_constants() -> None:
    inputs = {name: CASES["policy_clip"].inputs[name] for name in ("labels", "advantage")}
    check(Case(deviation, "", inputs), num_microbatches=2)
    with pytest.raises(autoptd.PlanError, match=r"the number itself, as in loss / x.shape.0."):
        check(Case(over_a_tensor, "", CASES["div_numel"].inputs), num_microbatches=2)


def test_a_divisor_made_of_parameters_is_refused() -> None:
    def over_probabilities(model: Model, ids: Tensor, labels: Tensor) -> Tensor:
        logits = model.logits(ids)
        return token_losses(logits, labels).sum() / logits.softmax(-1)[..., 0].sum()

    with pytest.raises(autoptd.PlanError, match="a divisor may be any sum over inputs"):
        check(Case(over_probabilities, "", CASES["div_numel"].inputs), num_microbatches=2)


def nll_of_probabilities(model: Model, ids: Tensor, labels: Tensor) -> Tensor:
    """Of values that no log_softmax made, with class weights and some labels ignored."""
    log_p = (model.logits(ids).softmax(-1) + 1e-3).log()
    weight = torch.linspace(0.5, 2.0, VOCAB, device=ids.device).to(log_p.dtype)
    return nn.functional.nll_loss(log_p.flatten(0, 1), labels.flatten(), weight=weight)


def smoothed_probabilities(model: Model, ids: Tensor, probabilities: Tensor) -> Tensor:
    """[b, classes, s], smoothed, with class weights."""
    logits, targets = model.logits(ids).transpose(1, 2), probabilities.transpose(1, 2)
    weight = torch.linspace(0.5, 2.0, VOCAB, device=ids.device).to(logits.dtype)
    return nn.functional.cross_entropy(logits, targets, weight=weight, label_smoothing=0.1)


def nll_sum(model: Model, ids: Tensor, labels: Tensor) -> Tensor:
    log_p = (model.logits(ids).softmax(-1) + 1e-3).log()
    each = nn.functional.nll_loss(log_p.transpose(1, 2), labels, reduction="none")
    return each.mean() + nn.functional.nll_loss(log_p.transpose(1, 2), labels, reduction="sum") / 100


CLASSES = {
    "nll with weights": Case(nll_of_probabilities, "", CASES["nll"].inputs),
    "probabilities, smoothed": Case(smoothed_probabilities, "", CASES["soft_labels"].inputs),
    "nll, each and summed": Case(nll_sum, "", CASES["nll"].inputs),
}


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("mesh", [LARGE, pytest.param("m=4", marks=pytest.mark.thorough)])
def test_losses_over_classes_are_those_of_one_device(name: str, mesh: str) -> None:
    check(CLASSES[name], **MESHES[mesh])


@pytest.mark.thorough
def test_a_checkpoint_of_another_mesh_knows_a_number_of_rows(tmp_path: Path) -> None:
    """1 / rows is a number of the model: that of the global batch, whatever the microbatches."""

    def scaled(model: Model, ids: Tensor, labels: Tensor) -> Tensor:
        return token_losses(model.logits(ids), labels).sum() * (1.0 / ids.shape[0])

    case = Case(scaled, "", CASES["div_numel"].inputs)
    found = []
    for mesh in ({"num_microbatches": 4}, {"d": 2, "num_microbatches": 2}, {"num_microbatches": 1}):
        pm = autoptd.parallelize(case.make(), **mesh, backend="local", example_inputs=case.call())
        if found:
            pm.load(tmp_path / "x")
        else:
            pm.save(tmp_path / "x")
        found.append(pm.step(**case.call()).item())
        pm.close()
    assert found == pytest.approx([found[0]] * 3, rel=1e-6)
