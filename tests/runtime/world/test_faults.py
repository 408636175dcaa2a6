"""The board on which ranks in several processes tell each other why they stopped."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from autoptd.errors import RuntimeFault
from autoptd.runtime.world import faults, rendezvous
from autoptd.runtime.world.faults import Call, FaultBoard, meet
from autoptd.runtime.world.pages import Pages
from tests.forks import CONTEXT
from tests.ports import free_port

RECEIVE = Call("receive", "RECV_B0.0<1")


def beat(count: int = 0, at: str = "", call: Call | None = None, is_waiting: bool = False) -> str:
    return json.dumps(
        {"count": count, "at": at, "call": call, "is_waiting": is_waiting, "script": [], "left": ""}
    )


def world_of(rank: int, size: int, at: str = "F0.0") -> Any:
    return SimpleNamespace(rank=rank, at=at, mesh=SimpleNamespace(size=size))


def test_rank_0_stays_until_the_others_have_read_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may host the store: whoever has not read the first fault when it goes could not say which rank failed.

    But it raises at once: torchrun ends it as soon as another rank has ended, and its own error is shown by then.
    """
    slept: list[float] = []
    at_exit: list[Any] = []
    monkeypatch.setattr(rendezvous.time, "sleep", slept.append)
    monkeypatch.setattr(rendezvous, "Finalize", lambda _, *given, exitpriority: at_exit.append(given))
    first = json.dumps({"rank": 3, "at": "B1.1", "error": "rank 3 is gone"})
    for rank in (0, 1):
        store = dist.HashStore()
        board = FaultBoard(store, world_of(rank, 4))
        for other in range(4):
            store.set(f"beat of {other}", beat())
        store.set(faults.FIRST, first)
        slept.clear()
        at_exit.clear()
        assert "rank 3" in str(board.fault_of_call(RECEIVE, RuntimeError("closed by peer")))
        board.close()
        assert not slept and len(at_exit) == (rank == 0)
        for call, given in at_exit:
            call(*given)  # Python does
        assert len(slept) == (rank == 0) and all(0 < seconds <= 2 * faults.BEAT for seconds in slept)


def test_two_ranks_in_different_calls_are_both_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "GRACE", 0.1)
    mine = Call("all_reduce", "loss", (0, 1), 17, 8)
    theirs = Call("all_reduce", "gradient norm", (0, 1), 17, 16)
    for other, wanted in (
        (
            theirs,
            "call 17 of ranks 0, 1 differs: rank 1 at loss: all_reduce 'loss' of 8 bytes, and rank 0 at B1.0: all_",
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


def two_boards(**keywords: Any) -> tuple[FaultBoard, FaultBoard, dist.HashStore]:
    store = dist.HashStore()
    first, second = (FaultBoard(store, world_of(rank, 2), **keywords) for rank in range(2))
    return first, second, store


def test_ctrl_c_on_one_rank_is_what_the_others_show_and_ends_its_own_calls() -> None:
    mine, other, store = two_boards()
    mine.report(KeyboardInterrupt())
    assert other._read_first(store)
    with pytest.raises(RuntimeFault, match=r"^rank 0 at F0.0: left \(KeyboardInterrupt\) \[seen by rank 1"):
        other.raise_first()
    with pytest.raises(RuntimeFault, match=r"rank 0 at F0.0: left \(KeyboardInterrupt\)\."):
        mine.enter(RECEIVE)  # what it calls now would meet what others called before
    for board in (mine, other):
        board.close()


@pytest.mark.parametrize("error", [ValueError("bad batch"), None], ids=["raises", "ends"])
def test_a_rank_whose_script_is_over_says_why(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    monkeypatch.setattr(faults, "GRACE", 0.1)
    monkeypatch.setattr(sys, "last_value", error, raising=False)
    monkeypatch.setattr(sys, "last_exc", error, raising=False)
    mine, other, _ = two_boards()
    mine._end()  # Python calls it
    text = str(other.fault_of_call(RECEIVE, RuntimeError("closed by peer")))
    wanted = "rank 0 at F0.0: left (ValueError: bad batch)" if error else "rank 0 left: its script has ended"
    assert wanted in text, text
    other.close()


def test_a_rank_that_closes_while_others_go_on_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loops of other lengths: one rank's data end before those of the others."""
    monkeypatch.setattr(faults, "GRACE", 0.1)
    mine, other, _ = two_boards()
    mine.close()
    text = str(other.fault_of_call(RECEIVE, RuntimeError("closed by peer")))
    assert (
        "rank 0 left: its script called pm.close()" in text and "Remedy: every rank makes every call" in text
    )
    other.close()


def test_an_error_is_told_with_the_line_of_the_user_that_raised_it() -> None:
    try:
        torch.nn.functional.linear(torch.ones(2), torch.ones(3, 3))  # within torch
    except RuntimeError as error:
        text = rendezvous.in_short(error)
        assert text.startswith("RuntimeError: ") and "(test_faults.py:" in text and "\n" not in text
    assert rendezvous.in_short(KeyboardInterrupt()) == "KeyboardInterrupt"


def test_scripts_that_call_different_things_are_seen_while_they_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "BEAT", 0.02)
    ended = threading.Event()
    mine, other, _ = two_boards(end_waits=ended.set)
    for board, calls in ((mine, ("step", "pm.save")), (other, ("step", "step", "step"))):
        for what in calls:
            board.begin(what)
    mine.enter(RECEIVE)
    assert ended.wait(30)  # the call in which it waits is ended, and says:
    text = str(mine.fault_of_call(RECEIVE, RuntimeError("ended")))
    assert (
        "its script calls pm.save where that of rank 1 calls step (call 2 of each). Remedy: every rank"
        in text
    )
    for board in (mine, other):
        board.close()


def test_a_rank_that_is_only_late_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "BEAT", 0.01)
    asked = threading.Event()
    mine, other, store = two_boards(end_waits=lambda: pytest.fail("ended"))
    right = mine._blame.of_scripts
    mine._blame.of_scripts = lambda *given: [right(*given), asked.set()][0]  # type: ignore[method-assign, func-returns-value]
    for what in ("step", "pm.save"):
        mine.begin(what)
    other.begin("step")
    mine.enter(RECEIVE)
    assert asked.wait(30) and not mine._read_first(store)
    for board in (mine, other):
        board.close()


def test_a_rank_that_left_before_it_arrived_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    store, words = dist.HashStore(), dist.HashStore()
    world = world_of(0, 2)
    world.timeout = 60
    board = FaultBoard(store, world)
    monkeypatch.setattr(rendezvous, "is_served", lambda _: True)
    monkeypatch.setattr(rendezvous, "store_from_env", lambda _: words)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(sys, "last_value", KeyboardInterrupt(), raising=False)
    monkeypatch.setattr(sys, "last_exc", KeyboardInterrupt(), raising=False)
    rendezvous._tell()  # Python calls it as rank 1 ends
    with pytest.raises(RuntimeFault, match=r"rank 0 at start: rank 1 left \(KeyboardInterrupt\), not"):
        meet(board, world, words)
    FaultBoard(store, world_of(1, 2)).close()
    meet(board, world, words)  # it has arrived
    board.close()


def test_another_call_in_one_place_is_seen_before_it_is_made(tmp_path: Path) -> None:
    pages = [Pages("run", rank, str(tmp_path)) for rank in range(2)]
    pages[1].write(("F0.1", (0, 1), 17, "all_reduce", "loss", 8))
    assert pages[0].first_other([1], ((0, 1), 17), ("all_reduce", "loss", 8)) is None
    assert (
        pages[0].first_other([1], ((0, 1), 7), ("all_reduce", "norm", 8)) is None
    )  # another call of the group
    assert pages[0].first_other([1], ((0, 2), 17), ("all_reduce", "norm", 8)) is None
    assert pages[0].first_other([2], ((0, 1), 17), ("all_reduce", "norm", 8)) is None  # on another machine
    for form in (("all_reduce", "norm", 8), ("all_reduce", "loss", 80), ("all_gather", "loss", 8)):
        assert pages[0].first_other([2, 1], ((0, 1), 17), form) == 1
    for each in pages:
        each.close()
