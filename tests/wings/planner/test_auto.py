"""`t="auto"`: what the planner chooses runs, and equals one device; what is given stays; wrong requests are told."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoptd
from autoptd.wings.planner.auto import planned
from examples.gpt import GPT, GPTConfig

SIZES = {"vocab_size": 64, "block_size": 16, "n_layer": 4, "n_head": 4, "n_embd": 32}


def batch(rows: int = 16, tokens: int = 16) -> tuple[Tensor, Tensor]:
    ids, targets = torch.randint(64, (2, rows, tokens), generator=torch.Generator().manual_seed(0))
    return ids, targets


def model() -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(**SIZES))


def test_what_is_chosen_is_what_the_planner_finds_best() -> None:
    program = autoptd.compile(model(), t="auto", gpus=8, machine="h100", example_inputs=batch())
    found = autoptd.plan(model(), gpus=8, cluster="dgx-h100", batch=16, software="autoptd").best.degrees
    assert {"t": program.mesh.t, "p": program.mesh.p, "d": program.mesh.d} == {
        key: found[key] for key in "tpd"
    }
    assert (program.v, program.num_microbatches) == (found["v"], found["m"])


@pytest.mark.one_in(9)
@pytest.mark.parametrize(
    "given",
    [
        {"t": "auto", "p": 2},
        {"p": "auto", "t": 2, "d": 1, "schedule": "gpipe"},
        {"v": "auto", "p": 2, "sequence_parallel": True, "t": 2},
        {"num_microbatches": "auto", "d": 4},
        {"t": "auto", "d": 2, "num_microbatches": 4},
        {"t": "auto", "p": 1, "c": 2},
    ],
)
def test_what_is_given_stays_and_the_rest_runs(given: dict[str, Any]) -> None:
    program = autoptd.compile(model(), **given, gpus=4, example_inputs=batch())
    found = {"t": program.mesh.t, "p": program.mesh.p, "d": program.mesh.d, "v": program.v}
    found["c"] = program.mesh.c
    found |= {"schedule": program.schedule_name, "num_microbatches": program.num_microbatches}
    found["sequence_parallel"] = program.plan["options"]["sequence_parallel"]
    assert program.mesh.size == 4
    assert all(found[name] == value for name, value in given.items() if value != "auto")
    autoptd.verify(model(), **given, gpus=4, example_inputs=batch(), steps=1)


def test_the_plan_is_for_our_own_runtime() -> None:
    """Not for the software that the cluster's file names: with long rows Megatron's scores would go through memory."""
    shape = {"vocab_size": 512, "block_size": 8192, "n_layer": 24, "n_head": 16, "n_embd": 2048}
    with torch.device("meta"):
        large = GPT(GPTConfig(**shape))
    ids = torch.zeros(8, 8192, dtype=torch.long, device="meta")
    chosen = planned(large, (ids, ids), {"t": "auto", "gpus": 8, "machine": "a100"})
    sizes = {"layers": 24, "hidden": 2048, "heads": 16, "seq": 8192, "vocab": 512, "dropout": False}
    ours, theirs = (
        autoptd.plan(sizes, gpus=8, batch=8, software=software).best.degrees for software in ("autoptd", None)
    )
    assert ours != theirs
    assert {name: chosen[name] for name in "tpd"} == {name: ours[name] for name in "tpd"}


def test_16_bit_parameters_are_held_in_16_bits() -> None:
    """Four times two bytes a parameter, as passes/stages/held_bytes.py counts: 10 GB do, where mixed precision takes 22."""
    with torch.device("meta"):
        large = GPT(GPTConfig(vocab_size=512, block_size=128, n_layer=24, n_head=16, n_embd=2048)).bfloat16()
    held = 4 * sum(one.numel() * one.element_size() for one in large.parameters())
    ids = torch.zeros(1, 128, dtype=torch.long, device="meta")
    asked = {"t": "auto", "gpus": 1, "machine": "a100"}
    assert planned(large, (ids, ids), {**asked, "memory": 1.25 * held})["t"] == 1
    with pytest.raises(autoptd.PlanError, match="nothing fits"):
        planned(large, (ids, ids), {**asked, "memory": 0.95 * held})
    with pytest.raises(autoptd.PlanError, match="nothing fits"):
        in_fp32 = {"accumulate_allreduce_grads_in_fp32": True, "memory": 1.25 * held}
        planned(large, (ids, ids), {**asked, **in_fp32})


def test_it_trains() -> None:
    one, call = model(), batch()
    pm = autoptd.parallelize(one, t="auto", gpus=2, example_inputs=call, backend="local")
    assert torch.allclose(pm.step(*call), one(*call)[1], atol=1e-5)
    pm.close()


def test_under_torchrun_the_example_is_the_global_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    chosen = planned(model(), batch(), {"t": 1, "p": 1, "d": "auto", "v": None})
    assert (chosen["d"], chosen["t"], "gpus" in chosen) == (4, 1, False)
    with pytest.raises(autoptd.PlanError, match="torchrun started 4"):
        planned(model(), batch(), {"t": "auto", "gpus": 8})


@pytest.mark.parametrize(
    ("given", "ranks", "d"),
    [
        ({}, 4, 4),
        ({"t": 2}, 4, 2),
        ({"t": 2, "p": 2, "v": 2}, 4, 1),
        ({"t": None, "p": 2, "c": 2, "num_microbatches": 2}, 16, 4),
        ({"plan": {"mesh": {"t": 2}}}, 8, 4),
        ({"plan": {"mesh": {"t": 2}}, "t": 2, "p": 2}, 8, 2),
    ],
)
def test_the_replicas_are_what_the_other_degrees_leave(given: dict[str, Any], ranks: int, d: int) -> None:
    """Without the planner, for which this batch would not do."""
    asked = {**given, "d": "auto", "backend": "local"}
    assert planned(model(), None, {**asked, "gpus": ranks}) == {**asked, "d": d}


def test_the_replicas_of_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "6")
    assert planned(model(), None, {"t": 2, "d": "auto"})["d"] == 3
    # Ranks as threads are not those of the launch.
    assert planned(model(), None, {"d": "auto", "gpus": 2, "backend": "local"})["d"] == 2
    with pytest.raises(autoptd.PlanError, match="6 ranks do not divide over t=2 p=2"):
        planned(model(), None, {"t": 2, "p": 2, "d": "auto"})


def test_replicas_without_a_plan_train() -> None:
    one, call = model(), batch()
    pm = autoptd.parallelize(one, t=2, d="auto", gpus=4, example_inputs=call, backend="local")
    assert torch.allclose(pm.step(*call), one(*call)[1], atol=1e-5)
    pm.close()


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"d": "auto"}, "the number of ranks is not known"),
        ({"d": "auto", "gpus": 0}, "gpus=0"),
        ({"d": "auto", "gpus": "4"}, "gpus='4'"),
        ({"d": "auto", "gpus": 4, "t": 0}, "t=0"),
        ({"d": "auto", "gpus": 4, "t": 8}, "4 ranks do not divide over t=8"),
        ({"d": "auto", "gpus": 4, "num_microbatches": 3}, "4 rows of a replica do not divide into 3"),
        ({"d": "auto", "gpus": 3}, "16 rows"),
        ({"d": "auto", "gpus": 4, "plan": {"mesh": {"d": 2}}}, "the plan sets d=2"),
        ({"d": "auto", "gpus": 4, "plan": {"mesh": 3}}, "plan: mesh: is 3"),
        ({"t": "auto"}, "the number of ranks is not known"),
        ({"t": 2, "gpus": 2}, "nothing to choose"),
        ({"t": "auto", "gpus": 3, "p": 2}, "no such plan"),
        ({"t": "auto", "d": "auto", "gpus": 4, "num_microbatches": 4}, "per replica"),
        ({"t": "auto", "d": 1, "gpus": 4, "num_microbatches": 5}, "do not divide"),
        ({"t": "auto", "gpus": 2, "machine": "abacus"}, "is not known to the planner"),
    ],
)
def test_what_cannot_be_chosen(given: dict[str, Any], told: str) -> None:
    with pytest.raises(autoptd.PlanError, match=told):
        autoptd.compile(model(), **given, example_inputs=batch())


def test_a_model_without_a_config_and_a_call_without_a_batch() -> None:
    with pytest.raises(autoptd.PlanError, match="no config"):
        autoptd.compile(nn.Linear(4, 4), t="auto", gpus=2, example_inputs=batch())
    with pytest.raises(autoptd.PlanError, match="the planner needs the batch"):
        autoptd.parallelize(model(), t="auto", gpus=2)
