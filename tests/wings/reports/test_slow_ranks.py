"""Slow ranks are named, with their host: beside those with the same work, three measured steps in a row, once."""

from __future__ import annotations

import io
import os
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from autoptd.ir.mesh import Mesh
from autoptd.runtime.measure.stepclock import StepTimes
from autoptd.wings.reports import progress
from autoptd.wings.reports.progress import SlowRanks, share_cores


def times(*compute: float) -> list[StepTimes]:
    return [StepTimes(rank, 1.0, x, 0.0, 0.0, 0, f"node{rank // 2}") for rank, x in enumerate(compute)]


def test_a_rank_that_stays_slow_is_named_once() -> None:
    slow, mesh = [], Mesh(t=2, d=2)
    watch = SlowRanks(mesh)
    for compute in (1.3, 1.3, 1.1, 1.3, 1.3, 1.25, 1.4, 1.0, 1.3, 1.3, 1.3):
        slow.append(watch.look(times(1.0, 1.05, 1.0, compute)))
    assert [len(texts) for texts in slow] == [0] * 5 + [1] + [0] * 4 + [1]
    assert (
        "rank 3 on node1 is slow" in slow[5][0]
        and "(now 1.25 s, median 1 s; the others are 0, 1, 2)" in slow[5][0]
    )


def test_of_two_ranks_the_other_one_is_the_measure() -> None:
    watch = SlowRanks(Mesh(d=2))
    assert [len(watch.look(times(1.3, 1.0))) for _ in range(3)] == [0, 0, 1]


def test_stages_are_not_alike() -> None:
    watch = SlowRanks(Mesh(p=4))
    assert [watch.look(times(1.0, 1.0, 1.0, 3.0)) for _ in range(3)] == [[], [], []]


def test_ranks_share_cores_unless_each_has_one_for_its_messages_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    for cores, is_shared in ((7, True), (8, False)):
        # Two ranks on each of two hosts.
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        assert share_cores(times(1.0, 1.0, 1.0, 1.0)) == is_shared


@pytest.mark.parametrize(
    ("is_local", "device", "cores", "count"),
    [(False, "cpu", 64, 1), (True, "cpu", 64, 0), (False, "cpu", 2, 0), (False, "meta", 2, 1)],
)
def test_progress_says_it_where_ranks_have_cores_of_their_own(
    is_local: bool, device: str, cores: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in `make demo`, where 8 processes share the cores of a laptop, nothing is said."""
    monkeypatch.setattr(progress, "is_local", lambda options: is_local)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    pm = mock.MagicMock(steps=0)
    pm.parameters.return_value = [torch.empty(1, device=device)]
    pm.coordinate, pm.options = progress.Coordinate(), SimpleNamespace(mesh=Mesh(d=2))
    pm.measured_step.return_value = (0.0, times(1.0, 2.0))
    stream: Any = io.StringIO()
    run = progress.Progress(pm, tokens=1, measure_every=1, stream=stream)
    for _ in range(6):
        run.step()
    assert stream.getvalue().count("rank 1 on node0 is slow") == count
