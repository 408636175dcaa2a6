"""Share flags of one process with all ranks along with the loss: a stop request, a failed save.

In: signals, and the flags of this process after each step or evaluation. Out: the same flags on every rank,
after the same step; on CUDA after the next one, since the host would otherwise wait for the device.

    signals = Signals((signal.SIGTERM, signal.SIGUSR1))             # the handler notes the signal, nothing else
    world.flags = FlagWatch(lambda: Flags(stop=signals.seen is not None), world.device)
    ...                                                             # a step: `sum_loss` calls `mine`, and `look`
    if world.flags.known.stop:                                      # save, and end
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch


class HostValue:
    """A 0-d tensor that the host reads later: on CUDA it is copied into pinned memory, and the host does not wait."""

    def __init__(self, x: torch.Tensor) -> None:
        self._x, self._copied = x, None
        if x.is_cuda:
            # Pinned memory makes the copy asynchronous.
            self._x = torch.empty((), dtype=x.dtype, device="cpu", pin_memory=True)
            self._x.copy_(x, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def read(self) -> Any:
        """Return the number; waits until the device has computed it."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._x.item()


# Each flag has a count of ranks below this in a sum, which float64 holds exactly.
MOST_RANKS = 1 << 17


class Flags(NamedTuple):
    """Flags of one rank, or of any rank: `stop` was requested, a save `failed`, or is pending (`busy`).

    A save is `due` if the time decides: only rank 0 sets it, and float64 has no room for a count of it.
    """

    stop: bool = False
    failed: bool = False
    busy: bool = False
    due: bool = False


class Signals:
    """Handle signals of this process from `open` to `close`, and keep the first one.

    Python allows this in the main thread only; elsewhere none are handled and `is_open` is False.
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


class FlagWatch:
    """The flags of one rank: `read` returns its own, `known` holds those set on any rank at the last
    exchange.
    """

    def __init__(self, read: Callable[[], Flags], device: torch.device) -> None:
        self._read, self._device = read, device
        self.is_late = device.type == "cuda"
        self._pending: HostValue | None = None
        self.known = Flags()

    def mine(self) -> torch.Tensor:
        """Return this rank's flags as a number (float64, 0-d), to be summed over all ranks with the loss."""
        code = sum(is_set * MOST_RANKS**place for place, is_set in enumerate(self._read()))
        # `full` is a kernel, where `tensor` would be a copy that waits.
        return torch.full((), code, dtype=torch.float64, device=self._device)

    def look(self, total: torch.Tensor) -> None:
        """Read the flags from the sum over all ranks."""
        value: HostValue | None = HostValue(total)
        if self.is_late:
            value, self._pending = self._pending, value
        if value is not None:
            counts = int(value.read())
            self.known = Flags(
                *(bool(counts // MOST_RANKS**place % MOST_RANKS) for place in range(len(Flags._fields)))
            )
