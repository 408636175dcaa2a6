"""Uncaught errors that end all ranks alike are told by one of them."""

from __future__ import annotations

import os
import sys
import threading

import pytest
import torch.distributed as dist

from autoptd.errors import PlanError, RuntimeFault, TraceError
from autoptd.runtime.world import rendezvous
from autoptd.wings.reports.excepthook import is_interrupt, print_errors_once

INTERRUPTED = RuntimeFault(
    "rank 1 at F0.0", "left (KeyboardInterrupt) [seen by rank 0 at B0.0 in receive 'x']", "look there"
)
ALIKE = [
    PlanError("t=3", "does not divide", "t=2"),
    TraceError("x", "is lost", "keep it"),
    KeyboardInterrupt(),
    INTERRUPTED,
]
OWN = [RuntimeFault("rank 1 at F0.0", "waited 10 s", "look there"), ValueError("of the user")]


@pytest.mark.parametrize("ranks", [(0, 1), (1, 0)], ids=["rank 0 is first", "rank 1 is first"])
def test_the_first_process_of_a_node_tells_of_errors_that_are_alike(
    monkeypatch: pytest.MonkeyPatch, ranks: tuple[int, int]
) -> None:
    """Not rank 0, which torchrun may have ended before it comes to that."""
    told: list[tuple[str, BaseException]] = []
    monkeypatch.setattr(
        sys, "excepthook", lambda kind, error, traceback: told.append((os.environ["RANK"], error))
    )
    store = dist.HashStore()
    monkeypatch.setattr(rendezvous, "is_served", lambda _: True)
    monkeypatch.setattr(rendezvous, "store_from_env", lambda _: store)
    monkeypatch.setenv("LOCAL_RANK", "1")
    print_errors_once()
    hook = sys.excepthook
    print_errors_once()
    assert sys.excepthook is hook
    for rank in map(str, ranks):
        monkeypatch.setenv("LOCAL_RANK", rank)
        monkeypatch.setenv("RANK", rank)
        for error in [*ALIKE, *OWN]:
            hook(type(error), error, None)
        one = PlanError("batch", f"rank {rank} alone has no rows", "give it some")
        hook(PlanError, one, None)
        assert told.pop() == (rank, one)
    first, second = map(str, ranks)
    assert told == [(first, error) for error in [*ALIKE[:2], *OWN]] + [(second, error) for error in OWN]
    monkeypatch.setattr(rendezvous, "is_served", lambda _: False)
    hook(PlanError, ALIKE[0], None)
    assert told[-1] == (second, ALIKE[0])  # nobody to ask: said twice rather than not at all


def test_who_does_not_tell_ends_after_who_does(monkeypatch: pytest.MonkeyPatch) -> None:
    store, waits, done = dist.HashStore(), threading.Event(), []
    monkeypatch.setattr(rendezvous, "is_served", lambda _: True)
    monkeypatch.setattr(rendezvous, "store_from_env", lambda _: store)
    monkeypatch.setattr(rendezvous.time, "sleep", lambda _: waits.set())
    monkeypatch.setattr(rendezvous, "TELLING", 60.0)

    def other() -> None:
        with rendezvous.told_once("a plan that fails") as is_own:
            assert not is_own
        done.append("other")

    monkeypatch.setenv("RANK", "0")
    with rendezvous.told_once("a plan that fails") as is_own:
        assert is_own
        monkeypatch.setenv("RANK", "1")
        thread = threading.Thread(target=other)
        thread.start()
        assert waits.wait(30)
        done.append("own")
    thread.join(30)
    assert done == ["own", "other"]


def test_ctrl_c_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setenv("LOCAL_RANK", "0")
    print_errors_once()
    sys.excepthook(KeyboardInterrupt, KeyboardInterrupt(), None)
    sys.excepthook(RuntimeFault, INTERRUPTED, None)
    told = "autoptd: rank 1 at F0.0: left (KeyboardInterrupt)"
    assert capsys.readouterr().err == f"KeyboardInterrupt\n{told}\n"
    assert is_interrupt(INTERRUPTED) and not is_interrupt(OWN[0])


def test_alone_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    before = sys.excepthook
    print_errors_once()
    assert sys.excepthook is before
