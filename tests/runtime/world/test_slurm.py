"""What a process finds in the variables of Slurm: its place in a step of several tasks, nothing elsewhere, or a clear error."""

from __future__ import annotations

import os
from typing import Any

import pytest

import autoptd
from autoptd.runtime.world.slurm import hosts, join_slurm_step
from tests.parity.models import batch, gpt

LISTS = {
    "node7": ["node7"],
    "a,b": ["a", "b"],
    "gpu[003-005,12],x7": ["gpu003", "gpu004", "gpu005", "gpu12", "x7"],
    "n[9-11]": ["n9", "n10", "n11"],
    "n[098-101]": ["n098", "n099", "n100", "n101"],
    "x7,gpu[1,3]": ["x7", "gpu1", "gpu3"],
    "rack[1-2]n[01-02]": ["rack1n01", "rack1n02", "rack2n01", "rack2n02"],
    "n[1-2].cluster.org,n[5].cluster.org": ["n1.cluster.org", "n2.cluster.org", "n5.cluster.org"],
    "a-b-[1-2],c-d": ["a-b-1", "a-b-2", "c-d"],
    "10.0.0.[7-8]": ["10.0.0.7", "10.0.0.8"],
}


@pytest.mark.parametrize(("listed", "expanded"), LISTS.items(), ids=str)
def test_a_list_of_hosts(listed: str, expanded: list[str]) -> None:
    assert list(hosts(listed)) == expanded


BATCH = {"SLURM_JOB_ID": "812", "SLURM_JOB_NODELIST": "n[1-4]", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}
TASK = {
    **BATCH,
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "n[2-3]",
}
PLACE = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "n2", "MASTER_PORT": "20040"}
# What torchrun sets for a rank of its own.
TORCHRUN = {
    "RANK": "9",
    "WORLD_SIZE": "16",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "n1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RESTART_COUNT": "0",
}


def without(*names: str) -> dict[str, str]:
    return {name: value for name, value in TASK.items() if name not in names}


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        (TASK, PLACE),
        (without("SLURM_STEP_NUM_TASKS"), PLACE),
        (without("SLURM_LOCALID"), {name: value for name, value in PLACE.items() if name != "LOCAL_RANK"}),
        (without("SLURM_STEP_NODELIST"), {**PLACE, "MASTER_ADDR": "n1"}),
        # What the user set stays.
        ({**TASK, "MASTER_PORT": "7"}, {**PLACE, "MASTER_PORT": "7"}),
        ({**TASK, "MASTER_ADDR": "n9", "WORLD_SIZE": "4"}, {**PLACE, "MASTER_ADDR": "n9"}),
        ({**TASK, "RANK": "0", "WORLD_SIZE": "4"}, {**PLACE, "RANK": "0"}),
        ({**TASK, **TORCHRUN}, TORCHRUN),
        # One process: a batch script, a shell of salloc, one task, torchrun on a node.
        (BATCH, {}),
        (without("SLURM_PROCID", "SLURM_STEP_ID"), {}),
        ({**TASK, "SLURM_STEP_NUM_TASKS": "1"}, {}),
        ({**TASK, "SLURM_STEP_NUM_TASKS": "1", **TORCHRUN}, TORCHRUN),
        ({**without("SLURM_STEP_NUM_TASKS"), "SLURM_NTASKS": "1"}, {}),
        (without("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), {}),
        ({}, {}),
    ],
)
def test_the_place_of_a_process(environment: dict[str, str], found: dict[str, str]) -> None:
    left = dict(environment)
    join_slurm_step(left)
    assert {name: value for name, value in left.items() if not name.startswith("SLURM")} == found


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({**TASK, "RANK": "0"}, "RANK: is set and WORLD_SIZE is not"),
        ({**TASK, "WORLD_SIZE": "8"}, "WORLD_SIZE: is 8, and the Slurm step has 4 tasks"),
        ({**TASK, "SLURM_PROCID": "x"}, "SLURM_PROCID: is 'x'"),
        ({**TASK, "SLURM_STEP_NUM_TASKS": ""}, "SLURM_STEP_NUM_TASKS: is ''"),
        (without("SLURM_JOB_ID"), "SLURM_JOB_ID: is None"),
        (
            without("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"),
            "MASTER_ADDR: is not set, nor is SLURM_STEP_NODELIST",
        ),
        ({**TASK, "SLURM_STEP_NODELIST": "n[1-"}, "SLURM_STEP_NODELIST: 'n"),
        ({**TASK, "SLURM_STEP_NODELIST": "n[x-2]"}, "SLURM_STEP_NODELIST: 'n"),
        ({**TASK, "SLURM_HET_SIZE": "2"}, "MASTER_ADDR: .* heterogeneous"),
    ],
)
def test_what_is_wrong_is_named(environment: dict[str, str], told: str) -> None:
    with pytest.raises(autoptd.PlanError, match=told):
        join_slurm_step(dict(environment))


def port(job: int, step: int) -> int:
    found = {**TASK, "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}
    join_slurm_step(found)
    return int(found["MASTER_PORT"])


def test_jobs_and_steps_on_a_node_have_different_ports() -> None:
    ports = {(job, step): port(job, step) for job in range(10**6, 10**6 + 500) for step in range(37)}
    assert len(set(ports.values())) == len(ports)
    assert min(ports.values()) > 1024 and max(ports.values()) < 32_768


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment without a launcher, put back after the test."""
    for name in os.environ:
        if name.startswith("SLURM") or name in PLACE:
            monkeypatch.delenv(name)
    # Variables that a call sets are removed again.
    for name in PLACE:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return monkeypatch


@pytest.mark.parametrize(
    ("set_", "told"),
    [
        (BATCH, "not started by torchrun or srun, only within a job of Slurm"),
        ({**TASK, "SLURM_STEP_NUM_TASKS": "1"}, "not started by torchrun or srun"),
        ({"RANK": "1"}, "RANK is set, and WORLD_SIZE is not"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set, and RANK is not"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "MASTER_ADDR, MASTER_PORT not set"),
        ({**TORCHRUN, "WORLD_SIZE": "two"}, "WORLD_SIZE='two': is not a number"),
        ({**TORCHRUN, "WORLD_SIZE": "2"}, "RANK=9: is not below WORLD_SIZE=2"),
        ({**TASK, "RANK": "0"}, "RANK: is set and WORLD_SIZE is not"),
    ],
)
def test_half_of_a_launch_is_an_error_that_names_the_variable(
    environment: pytest.MonkeyPatch, set_: dict[str, str], told: str
) -> None:
    for name, value in set_.items():
        environment.setenv(name, value)
    with pytest.raises(autoptd.PlanError, match=told):
        autoptd.parallelize(gpt(1), t=2, example_inputs=batch(4), ranks=autoptd.RankOptions(timeout=3.0))


@pytest.mark.parametrize("set_", [BATCH, {"RANK": "1"}, {"WORLD_SIZE": "2"}, {}], ids=str)
@pytest.mark.parametrize("keywords", [{}, {"d": 2, "backend": "local"}], ids=str)
def test_one_process_trains_by_itself(
    environment: pytest.MonkeyPatch, set_: dict[str, str], keywords: dict[str, Any]
) -> None:
    for name, value in set_.items():
        environment.setenv(name, value)
    waits = autoptd.RankOptions(timeout=3.0)
    pm = autoptd.parallelize(gpt(1), **keywords, example_inputs=batch(4), ranks=waits)
    assert pm.step(*batch(4)).isfinite()
    pm.close()


def test_ranks_as_threads_do_not_join_a_step(environment: pytest.MonkeyPatch) -> None:
    for name, value in TASK.items():
        environment.setenv(name, value)
    pm = autoptd.parallelize(gpt(1), d=2, backend="local", example_inputs=batch(4))
    assert pm.step(*batch(4)).isfinite() and "RANK" not in os.environ
    pm.close()
