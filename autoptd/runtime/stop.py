"""All ranks learn in the same step that one of them was asked to stop: the question travels with the loss.

In: a signal to any process. Out: the same answer on every rank, behind the same step or evaluation; on CUDA behind the next
one, as the host would else wait for the device.

    signals = Signals((signal.SIGTERM, signal.SIGUSR1))             # the handler sets a flag, nothing else
    world.stop = StopWatch(signals, world.device)
    ...                                                             # a step: `Executor` asks `mine`, and tells `look`
    if world.stop.is_agreed:                                        # save, and end
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch

from autoptd.runtime.host_flag import HostFlag


class Signals:
    """Takes signals of this process from `open` to `close`, and keeps the first one.

    Only in the main thread, as Python has it: elsewhere none is taken (`is_open` says so).
    """

    def __init__(self, numbers: Sequence[int]) -> None:
        self._numbers = tuple(numbers)
        self._before: dict[int, Any] = {}
        self.seen: int | None = None

    @property
    def is_open(self) -> bool:
        return bool(self._before)

    def open(self) -> None:
        try:
            self._before = {number: signal.signal(number, self._note) for number in self._numbers}
        except ValueError:
            self._before = {}

    def close(self) -> None:
        for number, handler in self._before.items():
            # None: it was not set by Python.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.seen = self.seen or number


class StopWatch:
    """What one rank knows of a request to stop: its own, and what all agreed on."""

    def __init__(self, signals: Signals, device: torch.device) -> None:
        self._signals, self._device = signals, device
        self._is_late = device.type == "cuda"
        self._pending: HostFlag | None = None
        self.is_agreed = False

    def mine(self) -> torch.Tensor:
        """Return 1 if this rank is asked to stop, else 0 (float64, 0-d): summed over all ranks with the loss."""
        # `full` is a kernel, where `tensor` would be a copy that waits.
        asked = float(self._signals.seen is not None)
        return torch.full((), asked, dtype=torch.float64, device=self._device)

    def look(self, total: torch.Tensor) -> None:
        """Take note of the sum over all ranks."""
        flag: HostFlag | None = HostFlag(total > 0)
        if self._is_late:
            flag, self._pending = self._pending, flag
        if flag is not None and flag.read():
            self.is_agreed = True


__all__ = ["Signals", "StopWatch"]
