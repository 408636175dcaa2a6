"""Ranks that srun starts, without torchrun: they meet by the SLURM_* variables alone, and train as one device does."""

from __future__ import annotations

import json
import random
import re
import socket
from pathlib import Path

import pytest

from tests.forks import finish, start

HERE = Path(__file__).parent

pytestmark = pytest.mark.processes


def step_of(size: int, job: int) -> dict[int, dict[str, object]]:
    """The variables of each task of a step, on this machine."""
    step = {
        "SLURM_JOB_ID": job,
        "SLURM_STEP_ID": 3,
        "SLURM_NTASKS": size,
        "SLURM_STEP_NUM_TASKS": size,
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_JOB_NODELIST": "x[1-2],localhost",
    }
    return {rank: {**step, "SLURM_PROCID": rank, "SLURM_LOCALID": rank} for rank in range(size)}


@pytest.mark.parametrize(("size", "mesh"), [(2, {"t": 2}), (4, {"p": 2, "d": "auto"})], ids=str)
def test_tasks_of_a_step_train_like_one_device(size: int, mesh: dict[str, object]) -> None:
    job = random.SystemRandom().randrange(10**6)
    results = finish(start(HERE / "under_slurm.py", size, json.dumps(mesh), launch=step_of(size, job)), 240)
    assert [code for code, _, _ in results] == [0] * size, "\n".join(err[-2000:] for _, _, err in results)
    found = [json.loads(out.splitlines()[-1]) for _, out, _ in results]
    assert [one["launch"] for one in found] == [
        {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "MASTER_ADDR": "localhost"}
        for rank in range(size)
    ]
    assert len({one["port"] for one in found}) == 1
    assert 0 < max(one["worst"] for one in found) <= 1e-9


def test_a_wrong_number_of_tasks_is_told_by_all() -> None:
    launch = step_of(2, random.SystemRandom().randrange(10**6))
    results = finish(start(HERE / "under_slurm.py", 2, '{"t": 4}', launch=launch), 120)
    assert all(code and "PlanError: world size 2: t*p*d is 4" in err for code, _, err in results), results


@pytest.mark.parametrize(
    ("absent", "told"),
    [
        pytest.param(3, "waited 6 s for rank 3, not arrived", marks=pytest.mark.thorough),
        (0, "the store of rank 0 at localhost:.* does not answer for 6 s"),
    ],
)
def test_a_task_that_is_missing_is_named_by_all(absent: int, told: str) -> None:
    step = step_of(4, random.SystemRandom().randrange(10**6))
    launch = dict(enumerate({**place, "WAITS": 6} for rank, place in step.items() if rank != absent))
    results = finish(start(HERE / "under_slurm.py", 3, '{"d": 4}', launch=launch), 120)
    assert all(code and re.search(told, err) for code, _, err in results), results


def test_another_program_at_the_port_is_named() -> None:
    launch = {rank: {**place, "WAITS": 3} for rank, place in step_of(2, 1).items()}
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        # It accepts connections, and never answers.
        other.listen()
        port = other.getsockname()[1]
        launch = {rank: {**place, "MASTER_PORT": port} for rank, place in launch.items()}
        results = finish(start(HERE / "under_slurm.py", 2, '{"t": 2}', launch=launch), 120)
    told = f"the store of rank 0 at localhost:{port} does not answer.* no other program uses this port"
    assert all(code and re.search(told, err) for code, _, err in results), results
