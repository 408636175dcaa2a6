"""Real processes over gloo: parity on 8 of them, a checkpoint, and a rank that is killed in the middle of a step."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent.parent

pytestmark = pytest.mark.processes


def start(script: str, world_size: int, *arguments: str) -> list[subprocess.Popen[str]]:
    """Start one process per rank, with the environment that torchrun would give them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(world_size):
        env = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        command = [sys.executable, str(HERE / script), *arguments]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        processes.append(subprocess.Popen(command, env=env, cwd=ROOT, **pipes))  # type: ignore[call-overload]
    return processes


def finish(processes: list[subprocess.Popen[str]], timeout: float) -> list[tuple[int, str, str]]:
    """(exit code, stdout, stderr) of every rank; whatever is left after `timeout` seconds is killed and fails the test."""
    deadline = time.monotonic() + timeout
    results = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=max(deadline - time.monotonic(), 1.0))
            results.append((process.returncode, out, err))
    finally:
        for process in processes:
            process.kill()
    return results


def test_eight_processes_train_like_one_device(tmp_path: Path) -> None:
    results = finish(start("train_and_compare.py", 8, str(tmp_path)), timeout=240)
    assert [code for code, _, _ in results] == [0] * 8, "\n".join(err[-2000:] for _, _, err in results)
    told = json.loads(results[0][1].splitlines()[-1])
    assert max(told["worst"].values()) <= 1e-9, told
    assert min(told["worst"].values()) > 0 or told["worst"]["gradient"] > 0, "nothing was compared"
    assert told["identical"], "a loaded checkpoint gives another loss"
    assert told["eval_equals_step"]


@pytest.mark.parametrize(("victim", "action"), [(3, "B1.1"), (1, "SEND_F0.2>1")])
def test_killed_rank_ends_the_others_and_is_named(victim: int, action: str) -> None:
    processes = start("die_in_a_step.py", 4, str(victim), action)
    results = finish(processes, timeout=120)
    assert results[victim][0] == -9
    for rank, (code, _, err) in enumerate(results):
        if rank != victim:
            assert code not in (0, None), f"rank {rank} went on"
            assert "RuntimeFault" in err and f"rank {victim}" in err, f"rank {rank} said:\n{err[-1500:]}"
