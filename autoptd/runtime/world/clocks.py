"""Read the clock of each rank: the host's or, on CUDA, the device's, since kernels run after the host
returns.

In: the devices of this process's ranks. Out: a `Clock` for each, all with one origin. `now()` never waits: on
CUDA it records an event on the current stream. `seconds()` waits until the device has reached that event, so
call it after the step.

    (clock,) = clocks_of([world.device])
    start = clock.now()
    ...
    clock.seconds(start)                            # since `clocks_of`
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch

from autoptd.runtime.world.world import on_device


class Clock(ABC):
    """The clock of one rank: `now` returns an opaque moment, `seconds` converts it."""

    @abstractmethod
    def now(self) -> Any:
        """Return this moment."""

    @abstractmethod
    def seconds(self, moment: Any) -> float:
        """Return the time of a moment, in seconds since the clocks were made."""


class HostClock(Clock):
    """The host's clock, for ranks on a CPU."""

    def __init__(self, origin: float) -> None:
        self._origin = origin

    def now(self) -> float:
        return time.perf_counter()

    def seconds(self, moment: float) -> float:
        return moment - self._origin


class DeviceClock(Clock):
    """A device's clock; `first` is the host's time at its creation, when the device must be idle."""

    def __init__(self, make_event: Callable[[], Any], first: float) -> None:
        self._make_event, self._first = make_event, first
        self._origin = self.now()

    def now(self) -> Any:
        event = self._make_event()
        event.record()
        return event

    def seconds(self, moment: Any) -> float:
        moment.synchronize()
        return self._first + self._origin.elapsed_time(moment) / 1e3  # type: ignore[no-any-return]


def clocks_of(devices: Sequence[torch.device]) -> list[Clock]:
    """Return a clock for each device; waits until all of them are idle."""
    origin = time.perf_counter()
    return [_clock(device, origin) for device in devices]


def _clock(device: torch.device, origin: float) -> Clock:
    if device.type != "cuda":
        return HostClock(origin)
    with on_device(device):
        # An idle device reaches the origin event at once, so host and device time agree there.
        torch.cuda.synchronize()
        return DeviceClock(lambda: torch.cuda.Event(enable_timing=True), time.perf_counter() - origin)


__all__ = ["Clock", "DeviceClock", "HostClock", "clocks_of"]
