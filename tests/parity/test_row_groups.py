"""Rows that belong together, neighbours or the same places of two halves: microbatches and replicas keep them together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import autoptd
from autoptd.runtime.step.microbatches import part_of_rows, take_rows
from benchmarks.lib.loss_cases import CASES, Case, Model, log_probs
from benchmarks.losses import MESHES

PAIRS, HALVES = CASES["dpo_pairs"], CASES["dpo_halves"]
LARGE = "t=2 p=2 d=2 m=2"


def gained(
    model: Model, ids: Tensor, labels: Tensor, mask: Tensor, base: Tensor, rate: float = 0.0
) -> Tensor:
    hidden = F.dropout(model.decoder(ids), rate, model.training)
    return (log_probs(model.lm_head(hidden), labels) * mask).sum(-1) - base


def preference(chosen: Tensor, rejected: Tensor) -> Tensor:
    return -F.logsigmoid(chosen - rejected).mean()


def dropped_halves(model: Model, ids: Tensor, **given: Tensor) -> Tensor:
    return preference(*gained(model, ids, **given, rate=0.3).chunk(2, 0))


def dropped_pairs(model: Model, ids: Tensor, **given: Tensor) -> Tensor:
    return preference(*gained(model, ids, **given, rate=0.3).view(-1, 2).unbind(1))


def sliced(model: Model, ids: Tensor, mask: Tensor, **given: Tensor) -> Tensor:
    """TRL's way: slices of halves, and a part of the loss over the chosen rows alone."""
    half = ids.shape[0] // 2
    gain = gained(model, ids, mask=mask, **given)
    return preference(gain[:half], gain[half:]) - gain[:half].sum() / mask[:half].sum() + gain.square().mean()


def viewed(model: Model, ids: Tensor, **given: Tensor) -> Tensor:
    gain = gained(model, ids, **given).view(2, -1)
    return preference(gain[0], gain[1])


WAYS = {
    "dropout in halves": dropped_halves,
    "dropout in pairs": dropped_pairs,
    "slices": sliced,
    "view(2, -1)": viewed,
}


def case_of(loss: Callable[..., Tensor]) -> Case:
    return Case(loss, "", PAIRS.inputs)


def check(loss: Callable[..., Tensor], **mesh: Any) -> None:
    case = case_of(loss)
    autoptd.verify(case.make(), example_inputs=case.call(), steps=2, **mesh)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mesh", [LARGE, pytest.param("m=4", marks=pytest.mark.thorough)])
def test_groups_stay_together(way: str, mesh: str) -> None:
    check(WAYS[way], **MESHES[mesh])


def advantages(rewards: Tensor, size: int, way: str) -> Tensor:
    """Rewards over the mean and the deviation of their group, in the ways of GRPO trainers."""
    if way == "blocks":
        groups = rewards.view(size, -1)
        return ((groups - groups.mean(0)) / (groups.std(0) + 1e-4)).view(-1)
    groups = rewards.view(-1, size)
    if way == "repeated":
        mean, deviation = (x.repeat_interleave(size, 0) for x in (groups.mean(1), groups.std(1)))
        return (rewards - mean) / (deviation + 1e-4)
    return ((groups - groups.mean(1, True)) / (groups.std(1, keepdim=True) + 1e-4)).view(-1)


@pytest.mark.one_in(13)
@pytest.mark.parametrize("way", ["kept", "repeated", "blocks"])
@pytest.mark.parametrize(("rows", "size", "microbatches"), [(8, 4, 2), (12, 3, 4)])
@pytest.mark.parametrize("mesh", [{"p": 2}, {"d": 2, "t": 2, "zero": 1}], ids=str)
def test_groups_of_more_rows_than_a_trace_has(
    mesh: dict[str, int], rows: int, size: int, microbatches: int, way: str
) -> None:
    """`rewards` are read in groups that fewer rows cannot make: the trace has two of them, a microbatch one."""

    def loss(model: Model, ids: Tensor, base: Tensor, **given: Tensor) -> Tensor:
        gain = gained(model, ids, base=torch.zeros_like(base), **given)
        return -(gain * advantages(base, size, way)).mean()

    case = case_of(loss)
    call = {name: torch.cat([x, x.flip(0)])[:rows] for name, x in case.call().items()}
    report = autoptd.verify(case.make(), example_inputs=call, steps=2, **mesh)
    assert report
    program = autoptd.compile(case.make(), example_inputs=call, **mesh)
    assert program.num_microbatches * mesh.get("d", 1) == microbatches
    assert program.row_blocks == (size if way == "blocks" else 1)


def test_groups_that_are_not_whole_are_refused() -> None:
    def loss(model: Model, ids: Tensor, base: Tensor, **given: Tensor) -> Tensor:
        return (advantages(base, 4, "kept") * gained(model, ids, base=base, **given)).mean()

    case = case_of(loss)
    with pytest.raises(autoptd.PlanError, match="reads 4 rows together, and a microbatch has 2"):
        autoptd.compile(case.make(), num_microbatches=4, example_inputs=case.call())
    few = {name: x[:4] for name, x in case.call().items()}
    with pytest.raises(autoptd.TraceError, match=r"with 2 of 4 rows.*two groups in the batch"):
        autoptd.compile(case.make(), d=2, example_inputs=few)


def test_the_default_number_of_microbatches_leaves_groups_whole() -> None:
    for case, blocks in ((PAIRS, 1), (HALVES, 2)):
        program = autoptd.compile(case.make(), d=2, example_inputs=case.call())
        assert (program.num_microbatches, program.rows, program.row_blocks) == (2, 2, blocks)
    with pytest.raises(autoptd.PlanError, match="reads 2 rows together, and a microbatch has 1"):
        autoptd.compile(PAIRS.make(), num_microbatches=8, example_inputs=PAIRS.call())


def test_rows_of_halves() -> None:
    rows = torch.arange(8)
    parts = [part_of_rows(rows, number, 2, 2).tolist() for number in range(2)]
    assert parts == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert part_of_rows(rows, 1, 2).tolist() == [4, 5, 6, 7]


def test_local_batch_takes_rows_of_both_halves() -> None:
    program = autoptd.compile(HALVES.make(), d=2, example_inputs=HALVES.call())
    call = HALVES.call()
    shares = [take_rows(program, (), dict(call), 2, replica)[1] for replica in range(2)]
    for name, whole in call.items():
        chosen, rejected = whole.chunk(2, 0)
        for share, one, other in zip(shares, chosen.chunk(2), rejected.chunk(2), strict=True):
            assert torch.equal(share[name], torch.cat([one, other]))
    with pytest.raises(autoptd.PlanError, match=r"in 2 blocks (do not divide|cannot be padded)"):
        take_rows(program, (), {name: x[:6] for name, x in call.items()}, 2, 0)


def test_rows_that_were_cut_before_halves_were_known_are_refused() -> None:
    pm = autoptd.parallelize(HALVES.make(), d=2, backend="local")
    pm._calls._cut_unseen = True
    with pytest.raises(autoptd.PlanError, match="was not known when it was cut"):
        pm.step(**HALVES.call())


@pytest.mark.parametrize(
    "mix",
    [
        lambda gain: preference(gain.view(2, -1)[0], gain.view(2, -1)[1].roll(1)),
        lambda gain: preference(gain[::2].flip(0), gain[1::2]),
    ],
    ids=["rolled", "flipped"],
)
def test_what_mixes_groups_takes_one_microbatch(mix: Callable[[Tensor], Tensor]) -> None:
    def loss(model: Model, ids: Tensor, **given: Tensor) -> Tensor:
        return mix(gained(model, ids, **given))

    with pytest.raises(autoptd.PlanError):
        check(loss, d=2, num_microbatches=2)
    check(loss, d=2)


def test_what_mixes_a_half_is_refused() -> None:
    def loss(model: Model, ids: Tensor, **given: Tensor) -> Tensor:
        gain = gained(model, ids, **given)
        return (gain.view(2, -1).softmax(1) * gain.view(2, -1)).mean()

    with pytest.raises(autoptd.PlanError, match="d=1 and num_microbatches=1"):
        check(loss, d=2)
    check(loss, num_microbatches=1)
