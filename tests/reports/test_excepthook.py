"""Uncaught errors that end all ranks alike are told by one of them."""

from __future__ import annotations

import sys

import pytest

from autoptd.errors import PlanError, RuntimeFault, TraceError
from autoptd.reports.excepthook import is_interrupt, print_errors_once

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


def test_one_process_of_a_node_tells_of_errors_that_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, traceback: told.append(error))
    monkeypatch.setenv("LOCAL_RANK", "1")
    print_errors_once()
    hook = sys.excepthook
    print_errors_once()
    assert sys.excepthook is hook
    for error in [*ALIKE, *OWN]:
        hook(type(error), error, None)
    assert told == OWN
    monkeypatch.setenv("LOCAL_RANK", "0")
    for error in ALIKE:
        hook(type(error), error, None)
    assert told == [*OWN, *ALIKE[:2]]


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
