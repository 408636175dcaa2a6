"""The board on which ranks in several processes tell each other why they stopped."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from autoptd.runtime.world import faults
from autoptd.runtime.world.faults import Call, FaultBoard
from autoptd.runtime.world.pages import Pages
from tests.forks import CONTEXT
from tests.ports import free_port

RECEIVE = Call("receive", "RECV_B0.0<1")


def beat(count: int = 0, at: str = "", call: Call | None = None, is_waiting: bool = False) -> str:
    return json.dumps({"count": count, "at": at, "call": call, "is_waiting": is_waiting})


def world_of(rank: int, size: int, at: str = "F0.0") -> Any:
    return SimpleNamespace(rank=rank, at=at, mesh=SimpleNamespace(size=size))


def test_rank_0_stays_until_the_others_have_read_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may host the store: whoever has not read the first fault when it goes could not say which rank failed."""
    slept: list[float] = []
    monkeypatch.setattr(faults.time, "sleep", slept.append)
    first = json.dumps({"rank": 3, "at": "B1.1", "error": "rank 3 is gone"})
    for rank in (0, 1):
        store = dist.HashStore()
        board = FaultBoard(store, world_of(rank, 4))
        for other in range(4):
            store.set(f"beat of {other}", beat())
        store.set(faults.FIRST, first)
        slept.clear()
        assert "rank 3" in str(board.fault_of_call(RECEIVE, RuntimeError("closed by peer")))
        board.close()
        assert slept == ([2 * faults.BEAT] if rank == 0 else [])


def test_two_ranks_in_different_calls_are_both_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "GRACE", 0.1)
    mine = Call("all_reduce", "loss", (0, 1), 17, 8)
    theirs = Call("all_reduce", "gradient norm", (0, 1), 17, 16)
    for other, wanted in (
        (
            theirs,
            "call 17 of ranks 0, 1 is not the same on rank 1 at loss: all_reduce 'loss' of 8 bytes, and rank 0 at B1.0: all_",
        ),
        (mine, "rank 0 is gone: it was last known at B1.0 in all_reduce 'loss' of 8 bytes"),
        (
            theirs._replace(number=16),
            "rank 0 is gone: it was last known at B1.0 in all_reduce 'gradient norm' of 16 bytes",
        ),
    ):
        store = dist.HashStore()
        board = FaultBoard(store, world_of(1, 2, "loss"))
        store.set("beat of 0", beat(1, "B1.0", other, is_waiting=True))
        board.enter(mine)
        assert wanted in str(board.fault_of_call(mine, RuntimeError("closed by peer")))
        board.close()


def test_what_a_page_says_is_newer_than_the_beat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "GRACE", 0.1)
    store = dist.HashStore()
    boards = [FaultBoard(store, world_of(rank, 2), notes_calls=True) for rank in range(2)]
    boards[0].enter(Call("all_reduce", "x", (0, 1), 2, 4))  # no beat has told of it
    fault = boards[1].fault_of_call(Call("all_reduce", "y", (0, 1), 2, 8), RuntimeError("closed by peer"))
    assert "'y' of 8 bytes, and rank 0 at F0.0: all_reduce 'x' of 4 bytes" in str(fault)
    for board in boards:
        board.close()


def test_pages_are_read_after_a_death_and_then_removed(tmp_path: Path) -> None:
    pages = Pages("run", 0, str(tmp_path))
    assert pages.read(0) is None and pages.read(1) is None
    dies = multiprocessing.get_context("fork").Process(target=note_and_die, args=(tmp_path,))
    dies.start()
    dies.join(30)
    pages.write(("a long note that is written over", 1))
    pages.write(("B1.0", 2))
    Pages("another run", 0, str(tmp_path)).write(("F0.0",))
    assert pages.is_dead(1) and not pages.is_dead(0) and not pages.is_dead(2)
    assert pages.read(1) == ["F0.1", "all_reduce", "(0, 1)"] and pages.read(0) == ["B1.0", "2"]
    pages.close()
    assert [one.name for one in tmp_path.iterdir()] == ["autoptd-another run-0"]


def note_and_die(folder: Path) -> None:
    Pages("run", 1, str(folder)).write(("F0.1", "all_reduce", (0, 1)))
    os.kill(os.getpid(), signal.SIGKILL)


def host_store(port: int, ready: Any) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    ready.set()
    threading.Event().wait()
    del store


@pytest.mark.processes
@pytest.mark.parametrize("what", ["fault_of_call", "report"])
def test_a_store_whose_host_is_silent_holds_nobody_up(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """Stopped, not dead: its connections stay open, and requests would wait for ever, whatever their timeout."""
    monkeypatch.setattr(faults, "PATIENCE", 0.5)
    monkeypatch.setattr(faults, "GRACE", 0.2)
    port = free_port()
    ready = CONTEXT.Event()
    host = CONTEXT.Process(target=host_store, args=(port, ready), daemon=True)
    host.start()
    try:
        assert ready.wait(60)
        store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        board = FaultBoard(store, world_of(1, 2))
        store.set("beat of 0", beat())
        os.kill(host.pid or 0, signal.SIGSTOP)
        found: list[Any] = []
        ask = {"fault_of_call": lambda exc: board.fault_of_call(RECEIVE, exc), "report": board.report}[what]
        # In a thread, so that a test that fails ends.
        thread = threading.Thread(target=lambda: found.append(ask(RuntimeError("timed out"))), daemon=True)
        thread.start()
        thread.join(30)
        assert not thread.is_alive()
        if what == "fault_of_call":
            assert "rank 1 at F0.0: receive 'RECV_B0.0<1' failed; the store does not answer: rank 0" in str(
                found[0]
            )
    finally:
        os.kill(host.pid or 0, signal.SIGKILL)
        host.join(10)
    board.close()
