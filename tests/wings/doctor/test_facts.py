"""What the ranks say of themselves, and what is wrong with it: no GPU is needed to say that two ranks share
one.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from autoptd.wings.doctor.launch import Facts, Verdict, judge, own_facts, ranks_text
from autoptd.wings.doctor.report import bandwidth_text
from autoptd.wings.words import seconds_text

GPU = {"backend": "nccl", "name": "NVIDIA H100", "total": 80e9, "free": 79e9}


def gpus(count: int, per_node: int = 2) -> list[Facts]:
    return [
        Facts(
            rank=rank,
            host=f"node{rank // per_node}",
            device=f"cuda:{rank % per_node}",
            uuid=f"GPU-{rank % per_node}",
            versions={"torch": "2.11.0", "nccl": "2.28.9", "autoptd": "0.1.0 (abc)"},
            settings={"NCCL_SOCKET_IFNAME": "ib0"},
            asked="timeout=30.0",
            **GPU,  # type: ignore[arg-type]
        )
        for rank in range(count)
    ]


def test_this_process_says_what_it_is() -> None:
    mine = own_facts(3, "t=2", "cpu", None)
    assert (mine.rank, mine.backend, mine.device, mine.name, mine.error) == (3, "gloo", "cpu", "CPU", "")
    assert mine.versions["torch"] == torch.__version__ and "(" in mine.versions["autoptd"] and mine.free > 0
    assert Facts.parse(mine.text()) == mine and len(mine.text()) < 2000
    verdict = judge([mine])
    assert Verdict.parse(verdict.text()) == verdict and verdict.stops == verdict.warnings == ()


def test_all_alike_is_well() -> None:
    verdict = judge(gpus(4))
    assert verdict.stops == verdict.warnings == () and verdict.per_node == 2
    assert verdict.hosts == (0, 0, 1, 1) and verdict.host_names == ("node0", "node1")


@pytest.mark.parametrize(
    ("rank", "change", "told"),
    [
        (
            2,
            {"versions": {"torch": "2.12.0", "nccl": "2.28.9", "autoptd": "0.1.0 (abc)"}},
            "version of torch is not",
        ),
        (
            1,
            {"versions": {"torch": "2.11.0", "nccl": "2.27.0", "autoptd": "0.1.0 (abc)"}},
            "2.27.0 on rank 1",
        ),
        (
            3,
            {"versions": {"torch": "2.11.0", "nccl": "2.28.9", "autoptd": "0.1.0 (x)"}},
            "0.1.0 (x) on rank 3",
        ),
        (
            1,
            {"asked": "t=2 timeout=30.0"},
            "command is not the same on all ranks: timeout=30.0 on rank 0, 2, 3; t=2",
        ),
        (
            3,
            {"uuid": "GPU-0", "device": "cuda:0"},
            "rank 2, 3 share cuda:0 of node1 (NVIDIA H100): NCCL refuses two",
        ),
        (
            1,
            {"error": "RuntimeError: cuda:1 was requested, and 1 are visible"},
            "rank 1 on node0 has no device: Runt",
        ),
    ],
)
def test_what_a_launch_would_break_of_stops_it(rank: int, change: dict[str, object], told: str) -> None:
    ranks = gpus(4)
    ranks[rank] = replace(ranks[rank], **change)  # type: ignore[arg-type]
    (line,) = judge(ranks).stops
    assert told in line


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            {"settings": {}},
            "NCCL_SOCKET_IFNAME is not the same on all ranks: ib0 on rank 0-2; not set on rank 3",
        ),
        (
            {"name": "NVIDIA A100"},
            "device is not the same on all ranks: NVIDIA H100 on rank 0-2; NVIDIA A100 on",
        ),
        (
            {"in_use": 20e9, "free": 59e9},
            "rank 3: 18.6 GiB of cuda:1 on node1 are in use by another process; 54.9 GiB of",
        ),
    ],
)
def test_what_may_be_slow_is_said(change: dict[str, object], told: str) -> None:
    ranks = gpus(4)
    ranks[3] = replace(ranks[3], **change)  # type: ignore[arg-type]
    verdict = judge(ranks)
    assert verdict.stops == () and verdict.warnings[0].startswith(told)


def test_thousands_are_told_in_a_line() -> None:
    ranks = gpus(3072, 8)
    ranks = [replace(one, asked="t=8") if one.rank % 2 else one for one in ranks]
    verdict = judge(ranks)
    assert all(len(line) < 300 for line in verdict.stops) and verdict.per_node == 8
    assert len(verdict.text()) < 60_000


def test_a_gpu_that_is_not_there_is_no_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "3")
    mine = own_facts(3, "", None, None)
    assert mine.error == "RuntimeError: cuda:3 was requested, and 2 are visible"


def test_words() -> None:
    assert ranks_text([3, 0, 1, 2, 7, 9, 10]) == "0-3, 7, 9, 10"
    assert ranks_text(range(0, 100, 2)).endswith("12, 14, ...")
    assert [seconds_text(one) for one in (3.12e-5, 0.0041, 2.5)] == ["31.2 us", "4.1 ms", "2.5 s"]
    assert bandwidth_text(1.234e9) == "1.23 GB/s" and bandwidth_text(12.0) == "12 B/s"
