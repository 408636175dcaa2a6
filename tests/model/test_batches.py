"""`Batches`: the rows of a step follow from its number, whatever the replicas, the workers and the step begun at."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset

import autoptd
from autoptd.errors import PlanError
from autoptd.model.batches import Batches, permuted
from tests.parity.models import batch, gpt
from tests.waits import LONG


class Rows(Dataset[int]):
    """Row i is i; slower ones in between, so that workers overtake each other."""

    def __len__(self) -> int:
        return 43

    def __getitem__(self, index: int) -> int:
        time.sleep(0.002 * (index % 3 == 0))
        return index


def replica(number: int, of: int, steps: int = 0) -> Any:
    """What `Batches` asks a ParallelModel for."""
    return SimpleNamespace(share=(number, of), steps=steps, clock=SimpleNamespace(jumps=0))


def read(number: int, of: int, workers: int, begin: int, end: int) -> list[list[int]]:
    """The rows of steps `begin` to `end` of one replica, over as many epochs as that takes."""
    pm, found = replica(number, of, begin), []
    loader = DataLoader(Rows(), batch_sampler=Batches(Rows(), 8, 3, pm=pm), num_workers=workers)
    while pm.steps < end:
        for rows in loader:
            found.append(rows.tolist())
            pm.steps += 1
            if pm.steps == end:
                break
    return found


@pytest.mark.parametrize("begin, workers", [(0, 0), (3, 0), (0, 3), (7, 1)])
def test_every_mesh_and_number_of_workers_reads_the_same_rows(begin: int, workers: int) -> None:
    """An epoch has 5 batches: these steps are in three of them."""
    wanted = [Batches(Rows(), 8, 3).rows_of(step) for step in range(begin, 12)]
    for of in (1, 2, 4) if workers == 0 else (2,):
        parts = [read(number, of, workers, begin, 12) for number in range(of)]
        assert [list(chain(*rows)) for rows in zip(*parts, strict=True)] == wanted


def test_an_epoch_has_each_row_once_and_drops_the_rest() -> None:
    batches = Batches(Rows(), 8, seed=1)
    assert len(batches) == 5
    epochs = [list(chain(*map(batches.rows_of, range(5 * k, 5 * k + 5)))) for k in range(3)]
    for rows in epochs:
        assert len(set(rows)) == 40 and set(rows) <= set(range(43))
    assert epochs[0] != epochs[1] != epochs[2]
    assert Batches(Rows(), 8, seed=2).rows_of(0) != batches.rows_of(0)
    assert Batches(Rows(), 8, shuffle=False).rows_of(6) == list(range(8, 16))
    # One device: the rest of the epoch that its first step is in.
    assert list(Batches(Rows(), 8, 1, start=8)) == [batches.rows_of(8), batches.rows_of(9)]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3000), st.integers(0, 100))
def test_it_is_a_permutation(size: int, key: int) -> None:
    places = permuted(np.arange(size, dtype=np.uint64), size, f"{key}")
    assert sorted(places.tolist()) == list(range(size))


def test_every_place_gets_every_row_as_often() -> None:
    """Chi-square of 12 x 12 counts: 121 degrees of freedom, so above 200 less than once in 10,000 seeds."""
    for step in (1, 5):
        counts = np.zeros((12, 12))
        for key in range(6000):
            after = permuted(np.arange(12, dtype=np.uint64), 12, str(key))
            # Of the rows themselves, and of how far two neighbours are from each other.
            counts[
                np.arange(12),
                after if step == 1 else (after + np.uint64(12) - np.roll(after, 1)) % np.uint64(12),
            ] += 1
        expected = counts.mean() if step == 1 else counts.sum() / 12 / 11
        seen = counts if step == 1 else counts[:, 1:]
        assert ((seen - expected) ** 2 / expected).sum() < 200


def test_a_large_dataset_takes_no_memory() -> None:
    rows = Batches(range(10**12), 4, seed=0).rows_of(7 * 10**10)  # type: ignore[arg-type]
    assert len(set(rows)) == 4 and max(rows) > 10**9


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(40))


@pytest.mark.parametrize(
    "make, told",
    [
        (lambda: Batches(Stream(), 4), "a Stream has no length"),  # type: ignore[arg-type]
        (lambda: Batches(Rows(), 44), "batch=44: a dataset of 43 rows"),
        (lambda: Batches(Rows(), 0), "batch=0"),
        (lambda: Batches(Rows(), 4, seed=1.0), "seed=1.0: must be an integer"),  # type: ignore[arg-type]
        (lambda: Batches(Rows(), 4, start=-1), "start=-1: must be a non-negative integer"),
        (lambda: Batches(Rows(), 6, pm=replica(0, 4)), "batch=6: does not divide over 4 replicas"),
    ],
)
def test_what_is_refused(make: Any, told: str) -> None:
    with pytest.raises(PlanError, match=told):
        make()


def test_a_position_that_changes_under_way_is_refused() -> None:
    """The loader was begun before the run was resumed: its rows would be those of another step."""
    pm = replica(0, 1)
    rows = iter(Batches(Rows(), 8, pm=pm))
    next(rows)
    pm.steps = 3
    with pytest.raises(PlanError, match=r"began at step 0 .* up to 0, and pm.steps is 3.*after resume\(\)"):
        next(rows)


def test_a_loader_that_is_ahead_does_not_hide_a_resume() -> None:
    """Its workers were given more batches than the run jumps over."""
    pm = autoptd.parallelize(gpt(1), d=2, backend="local", example_inputs=batch(8))
    batches = Batches(Rows(), 8, pm=pm)
    for begin in (2, 0):
        rows = iter(DataLoader(Rows(), batch_sampler=batches, num_workers=1))
        pm.steps = begin
        with pytest.raises(PlanError, match=f"began at step .* up to ., and pm.steps was set to {begin}"):
            next(rows)
    assert next(iter(Batches(Rows(), np.int64(8), np.int64(3)))) == Batches(Rows(), 8, 3).rows_of(0)
    pm.close()


def test_ranks_that_are_threads_take_the_global_batch() -> None:
    x, y = batch(8)
    data = [(x[row % 8], y[row % 8]) for row in range(43)]
    pm = autoptd.parallelize(gpt(1), d=2, backend="local")
    batches = autoptd.Batches(data, 8, 3, pm=pm)
    assert batches.step == 0
    for step, (ids, targets) in enumerate(DataLoader(data, batch_sampler=batches)):
        assert torch.equal(ids, x[[row % 8 for row in Batches(data, 8, 3).rows_of(step)]])
        pm.step(ids, targets)
    assert batches.step == 5
    pm.close()


LOADS = """
import signal, sys, autoptd
from torch.utils.data import DataLoader

signal.signal(signal.SIGTERM, lambda *_: None)
loader = DataLoader(range(40), batch_size=4, num_workers=2, worker_init_fn={init}, persistent_workers=True)
for number, rows in enumerate(loader):
    if number == 1:
        print("in the middle", flush=True)
        sys.stdin.readline()
print("read", number + 1, flush=True)
"""


@pytest.mark.processes
@pytest.mark.parametrize("init", ["autoptd.ignore_signals", pytest.param("None", marks=pytest.mark.thorough)])
def test_workers_outlive_a_signal_to_the_job(init: str) -> None:
    """And end with their parent, which waits for them."""
    process = start(LOADS.format(init=init))
    assert process.stdout is not None and process.stdout.readline() == "in the middle\n"
    # As launchers do: to all processes of the job.
    os.killpg(process.pid, signal.SIGTERM)
    out, err = process.communicate("go on\n", timeout=LONG)
    if init == "None":
        assert process.returncode == 1 and "DataLoader worker (pid" in err, err
    else:
        assert (process.returncode, out) == (0, "read 10\n"), err


# A signal is lost where one of its kind still waits to be taken, so that each is waited for, and the last is sent again.
IGNORES = """
import os, signal, sys, time, autoptd
from autoptd.model.batches import ignore_signals

ready, tell = os.pipe()
if (worker := os.fork()) == 0:
    ignore_signals(0)
    os.write(tell, b"x")
    time.sleep(600)
os.read(ready, 1)
print(worker, flush=True)
sys.stdin.readline()
time.sleep(0.2)
print("runs", os.waitpid(worker, os.WNOHANG) == (0, 0))
while (ended := os.waitpid(worker, os.WNOHANG)) == (0, 0):
    os.kill(worker, signal.SIGTERM)
    time.sleep(0.05)
print(os.waitstatus_to_exitcode(ended[1]))
"""


@pytest.mark.processes
def test_a_worker_ends_when_its_own_rank_ends_it() -> None:
    process = start(IGNORES)
    assert process.stdout is not None
    worker = int(process.stdout.readline())
    for one in (signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM):
        os.kill(worker, one)
        while waiting(worker):
            time.sleep(0.01)
    out, err = process.communicate("go on\n", timeout=LONG)
    assert (process.returncode, out) == (0, "runs True\n0\n"), err


def waiting(process: int) -> bool:
    """Return whether a signal to the process has not been taken yet."""
    status = Path(f"/proc/{process}/status").read_text()
    return re.search(r"^ShdPnd:\s*0+$", status, re.MULTILINE) is None


def start(code: str) -> subprocess.Popen[str]:
    """Start a script as a job of its own."""
    pipes: dict[str, Any] = {
        "stdin": subprocess.PIPE,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
    }
    return subprocess.Popen([sys.executable, "-c", code], start_new_session=True, **pipes)
