"""Real processes over gloo: all right, a rank that sends wrong numbers, one that never comes, one that is
stopped midway.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from autoptd.runtime.world.processes import DistributedChannel, DistributedGroup
from autoptd.wings.cli import main
from autoptd.wings.doctor import run
from autoptd.wings.doctor.checks import SMALL
from autoptd.wings.doctor.run import Request, run_launched
from tests.forks import CONTEXT
from tests.measured import same_table
from tests.ports import free_port
from tests.processes.in_order import register

PATIENCE = 150.0  # seconds, after which a test fails

pytestmark = pytest.mark.processes


def page_blocks() -> list[str]:
    """What the page shows of output."""
    page = Path(__file__).parents[3] / "docs" / "howto" / "check-a-launch.md"
    return re.findall(r"```text\n(.*?)```", page.read_text(), re.S)


def _serve(
    rank: int, size: int, port: int, folder: Path, words: list[str], spoil: bool, backend: str | None
) -> None:
    """One rank: `autoptd doctor` with the environment that torchrun would give it.

    What it prints goes to files.
    """
    for name, number in (("out", 1), ("err", 2)):
        file = os.open(folder / f"{rank}.{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    if spoil:
        spoil_calls()
    if size > 2:
        # Two check and time the largest tensors, as users' ranks do.
        run.COUNTS, run.sizes_on = (1, 1021, 1 << 16), lambda device: (SMALL, 1 << 20)
    if backend is None:
        sys.exit(main(["doctor", *words]))
    register()
    sys.exit(run_launched(Request(backend=backend, timeout=60.0, degrees={"p": size})))


def spoil_calls() -> None:
    """Let this rank send wrong float32, and hand wrong bfloat16 into sums."""
    send, reduce = DistributedChannel.send, DistributedGroup.all_reduce

    def wrong_send(self: Any, tensors: Sequence[torch.Tensor], site: str) -> Any:
        return send(self, [x + 1 if x.dtype is torch.float32 else x for x in tensors], site)

    def wrong_reduce(self: Any, x: torch.Tensor, site: str, op: str = "sum") -> torch.Tensor:
        return reduce(self, x * 2 if x.dtype is torch.bfloat16 else x, site, op)

    DistributedChannel.send, DistributedGroup.all_reduce = wrong_send, wrong_reduce  # type: ignore[method-assign]


class Launch:
    """The processes of a launch, as torchrun would start them: those of `absent` are not, that of `spoiled`
    is wrong.
    """

    def __init__(
        self,
        folder: Path,
        size: int,
        *words: str,
        absent: int = -1,
        spoiled: int = -1,
        backend: str | None = None,
    ) -> None:
        port, self.folder, self.processes = free_port(), folder, {}
        for rank in [one for one in range(size) if one != absent]:
            arguments = (rank, size, port, folder, list(words), rank == spoiled, backend)
            self.processes[rank] = CONTEXT.Process(target=_serve, args=arguments)
            self.processes[rank].start()

    def out(self, rank: int) -> str:
        return self._read(rank, "out")

    def err(self, rank: int) -> str:
        return self._read(rank, "err")

    def _read(self, rank: int, name: str) -> str:
        file = self.folder / f"{rank}.{name}"
        return file.read_text() if file.exists() else ""

    def until(self, rank: int, words: str) -> None:
        """Wait until a rank has told this on stderr."""
        deadline = time.monotonic() + PATIENCE
        while words not in self.err(rank):
            assert time.monotonic() < deadline, self.err(rank)
            time.sleep(0.02)

    def ends(self, but: int = -1) -> dict[int, int | None]:
        """The status of every rank; `but` is not waited for. Nothing is left behind."""
        deadline = time.monotonic() + PATIENCE
        status = {}
        for rank, process in self.processes.items():
            if rank != but:
                process.join(max(deadline - time.monotonic(), 1.0))
                status[rank] = process.exitcode
        for process in self.processes.values():
            process.kill()
            process.join()
        return status

    def said(self) -> str:
        return "\n".join(f"-- rank {rank}\n{self.out(rank)}{self.err(rank)}" for rank in self.processes)


def test_four_ranks_look_at_several_meshes(tmp_path: Path) -> None:
    launch = Launch(tmp_path, 4, "--json", str(tmp_path / "doctor.json"), "--timeout", "60")
    assert set(launch.ends().values()) == {0}, launch.said()
    text, record = launch.out(0), json.loads((tmp_path / "doctor.json").read_text())
    assert text.startswith("4 ranks on ") and ": gloo, CPU, " in text
    meshes = ["t=4 p=1 d=1", "t=1 p=2 d=2"]
    assert all(f"\n{mesh}: " in text and f"trying {mesh} ... " in launch.err(0) for mesh in meshes)
    assert "pp    message         4 pairs" in text and "compares with laptop-cpu" in text
    assert record["status"] == 0 and record["wrong"] == [] and len(record["meshes"]) == 2
    assert all(one["bytes_per_second"] > 0 for mesh in record["meshes"] for one in mesh["times"])
    assert not any(launch.out(rank) for rank in (1, 2, 3)), "rank 0 alone prints"
    shown, *_ = page_blocks()
    assert same_table(shown) == same_table(text)[: len(same_table(shown))], (
        "docs/howto/check-a-launch.md shows another table"
    )


def test_no_call_waits_for_a_later_one_where_a_device_is_one_queue(tmp_path: Path) -> None:
    """As NCCL may run what a rank issued: in its order, whatever the group or channel."""
    launch = Launch(tmp_path, 3, backend="in_order")
    assert set(launch.ends().values()) == {0}, launch.said()
    assert "t=1 p=3 d=1: " in launch.out(0) and "pp    message         6 pairs" in launch.out(0)


def test_wrong_numbers_are_told_by_both_ends(tmp_path: Path) -> None:
    launch = Launch(tmp_path, 2, "--timeout", "60", spoiled=1)
    assert set(launch.ends().values()) == {1}, launch.said()
    lines = [line for line in launch.out(0).partition("\nWrong:\n")[2].splitlines() if line.startswith("  ")]
    assert len(lines) == 3, launch.out(0)
    for axis, mesh in (("pp", "t=1 p=2 d=1"), ("tp", "t=2 p=1 d=1")):
        start = f"  over {axis} of ranks 0, 1 ({mesh}): the part of rank 1 is wrong on rank 0, 1: all_reduce"
        assert any(line.startswith(start) for line in lines), lines
    assert "  " + page_blocks()[1].strip() in lines


@pytest.mark.one_in(9)
@pytest.mark.parametrize("absent", [0, 1])
def test_a_rank_that_never_comes_is_named(absent: int, tmp_path: Path) -> None:
    # Without rank 0 nobody can be late.
    launch = Launch(tmp_path, 3, "--timeout", "4" if absent else "1", absent=absent)
    assert set(launch.ends().values()) == {1}, launch.said()
    if absent == 0:  # which has the store: nobody can be asked who is to tell
        words = " at start: the store of rank 0 at 127.0.0.1:"
        assert all(f"RuntimeFault: rank {rank}{words}" in launch.err(rank) for rank in (1, 2)), launch.said()
        return
    fault = "waited 4 s for rank 1, not arrived (2 of 3 are here)"
    assert fault in launch.out(0) and fault in launch.err(2) and not launch.out(2), launch.said()
    assert page_blocks()[2].strip() in launch.out(0)


@pytest.mark.thorough
@pytest.mark.parametrize(("size", "victim", "mesh"), [(4, 2, "t=4 p=1 d=1"), (2, 0, "t=2 p=1 d=1")])
def test_a_rank_that_is_stopped_is_named(size: int, victim: int, mesh: str, tmp_path: Path) -> None:
    """Stopped, not ended: its connections stay open, and nothing fails but by the timeout."""
    launch = Launch(tmp_path, size, "--timeout", "5")
    launch.until(0, f"{mesh} ...")
    os.kill(launch.processes[victim].pid, signal.SIGSTOP)
    status = launch.ends(but=victim)
    assert set(status.values()) == {1}, launch.said()
    if victim == 0:
        # Its machine has the store: nothing can be asked any more.
        assert "rank 0 is gone" in launch.err(1) or "does not answer" in launch.err(1), launch.said()
        return
    gone = r"RuntimeFault: rank \d at .*(rank 2 is gone: it was last known at |waited 5 s for rank 2, not arrived)"
    assert all(re.search(gone, text) for text in (launch.out(0), launch.err(1), launch.err(3))), launch.said()
