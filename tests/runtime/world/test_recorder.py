"""Flight records at a fault: of every rank that lives on, under names that say what a group is for."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from autoptd.ir.mesh import Mesh
from autoptd.runtime.world import recorder
from autoptd.runtime.world.processes import DistributedWorld
from autoptd.runtime.world.recorder import Recorder, describe, ranges_text, set_defaults
from autoptd.runtime.world.world import Communicators
from tests.ports import free_port
from tests.runtime.world.test_world import in_processes
from tests.waits import LONG


def test_groups_are_named_by_what_they_run_along() -> None:
    mesh, communicators = Mesh(t=4, p=3, d=2), Communicators(owners=((0, 2),), sub_axes=("tp:(2)2",))
    names = {describe(mesh, communicators, ranks) for ranks in communicators.groups(mesh)}
    assert {"tp of ranks 4-7", "dp of ranks 1, 5", "pp of ranks 2, 10, 18"} <= names
    assert {"tied over ranks 0, 16", "tp:(2)2 of ranks 0-1"} <= names
    # One name, one group: the mesh's own groups are told apart.
    assert len(names) == len(communicators.groups(mesh))


@pytest.mark.parametrize(
    "ranks, text",
    [
        ((5,), "5"),
        ((0, 1), "0-1"),
        ((0, 8), "0, 8"),
        (tuple(range(8)), "0-7"),
        (tuple(range(3, 35, 8)), "3, 11, ..., 27"),
        ((0, 1, 2, 8, 9, 20), "0-2, 8-9, 20"),
    ],
)
def test_ranks_in_short(ranks: tuple[int, ...], text: str) -> None:
    assert ranges_text(ranks) == text


@pytest.mark.parametrize(
    "before, size",
    [({}, "2000"), ({"TORCH_NCCL_TRACE_BUFFER_SIZE": "7"}, None), ({"TORCH_FR_BUFFER_SIZE": "9"}, "9")],
)
def test_what_the_user_set_stays(
    monkeypatch: pytest.MonkeyPatch, before: dict[str, str], size: str | None
) -> None:
    for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_NCCL_DUMP_ON_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in before.items():
        monkeypatch.setenv(name, value)
    set_defaults()
    assert os.environ.get("TORCH_FR_BUFFER_SIZE") == size and os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"


def test_where_nothing_can_be_written_the_fault_is_told_all_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(recorder, "flight_record", lambda groups: b"x")
    (tmp_path / "file").write_text("")
    lost = Recorder(3, "0123456789", tmp_path / "file")
    lost.dump()
    assert lost.hint == ""
    own = Recorder(3, "0123456789", tmp_path)
    assert own.hint == ""
    own.dump()
    assert (tmp_path / "01234567" / "rank_3").read_bytes() == b"x" and str(tmp_path / "01234567") in own.hint


def fail_on_one(rank: int, port: int, folder: Path, out: Any) -> None:
    """Rank 1 raises, the others wait for it."""
    os.chdir(folder)
    os.environ.update(RANK=str(rank), WORLD_SIZE="3", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    world = DistributedWorld(Mesh(t=3), Communicators(), timeout=20.0, device="cpu")
    try:
        world.group(("tp",)).all_reduce(torch.ones(3), "first")
        if rank == 1:
            raise ZeroDivisionError
        world.group(("tp",)).all_reduce(torch.ones(5), "second")
    except Exception as exc:
        world.report_fault(exc)
        out.put((rank, str(exc)))


@pytest.mark.processes
def test_every_rank_writes_its_record_at_a_fault(tmp_path: Path) -> None:
    said = in_processes(3, fail_on_one, free_port(), tmp_path)
    (told,) = {re.findall(r"torchfrtrace (.*?)\.$", said[rank])[0] for rank in (0, 2)}
    (folder,) = (tmp_path / "out" / "faults").iterdir()
    assert sorted(file.name for file in folder.iterdir()) == ["rank_0", "rank_1", "rank_2"]
    sizes = {}
    for file in folder.iterdir():
        entries = pickle.loads(file.read_bytes())["entries"]
        assert {entry["process_group"][1] for entry in entries} >= {"tp of ranks 0-2"}
        sizes[file.name] = entries[-1]["input_sizes"]
    assert sizes == {"rank_0": [[5]], "rank_1": [[3]], "rank_2": [[5]]}
    # The line that the message says.
    command = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", *told.split()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LONG)
    assert done.returncode == 0, done.stderr
    assert "tp of ranks 0-2" in done.stdout + done.stderr
