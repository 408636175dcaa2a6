"""A rank that is stuck in a call is spoken for."""

from __future__ import annotations

import threading

from autoptd.errors import RuntimeFault
from autoptd.runtime.world.faults import Call
from autoptd.wings.doctor.watch import watching


class Board:
    """What `watching` asks of a FaultBoard."""

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds

    def waiting(self) -> tuple[Call, float] | None:
        return None if self._seconds is None else (Call("gather_objects", "doctor: times"), self._seconds)

    def fault_of_call(self, call: Call, exc: BaseException) -> RuntimeFault:
        return RuntimeFault("rank 1", f"{call} failed: {exc}", "look there")


def told(board: Board, seconds: float) -> list[str]:
    found: list[str] = []
    is_told = threading.Event()

    def on_fault(fault: RuntimeFault) -> None:
        found.append(str(fault))
        is_told.set()

    with watching(board, 0.01, on_fault):  # type: ignore[arg-type]
        is_told.wait(seconds)
    return found


def test_who_is_stuck_is_told_once() -> None:
    (text,) = told(Board(31.0), 5.0)
    assert text.startswith("rank 1: gather_objects 'doctor: times' failed: not back after 31 s")


def test_who_is_not_is_left_alone() -> None:
    assert told(Board(None), 0.1) == [] and told(Board(0.001), 0.1) == []
