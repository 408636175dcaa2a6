"""The time of a call that others take part in: the board knows of it, and says why it failed.

with WaitingCall(board, call):
    work.wait()
"""

from __future__ import annotations

from types import TracebackType

from autoptd.runtime.world.calls import Call
from autoptd.runtime.world.faults import FaultBoard


class WaitingCall:
    """The time of a call that others take part in; when it fails, the first fault is raised instead."""

    def __init__(self, board: FaultBoard, call: Call) -> None:
        self._board, self._call = board, call

    def __enter__(self) -> Call:
        self._board.enter(self._call)
        return self._call

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, _: TracebackType | None
    ) -> None:
        if exc is None:
            self._board.leave()
        # What torch.distributed raises for timeouts and lost connections.
        elif isinstance(exc, RuntimeError):
            raise self._board.fault_of_call(self._call, exc) from exc
        else:
            self._board.leave()


__all__ = ["WaitingCall"]
