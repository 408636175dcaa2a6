"""Record when each rank executed each action, optionally with delays that simulate slower hardware.

In: the devices of this process's ranks, and delays by (stage, kind). Out: a `Timeline` of `Span`s, one per action, with
one origin: when the host executed it or, on CUDA, the device. Waiting is not in the spans: an F or B starts when its
messages have arrived. Its delay comes next, before it computes or sends anything, so that it acts like compute. Without
a timeline the overhead is one comparison per action.

    with ranks.timed({(0, Kind.F): 0.02, (0, Kind.B): 0.04}) as timeline:
        ranks.run("step", step)
    timeline.makespan, timeline.bubble        # to be compared with those of `schedule.simulate`

Spans of several steps follow each other; `makespan` and `bubble` cover the whole timeline, so time one step for them.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from autoptd.ir.actions import COMPUTES, Action, Kind
from autoptd.runtime.world.world import on_device


class Clock(ABC):
    """The clock of one rank: `now` returns an opaque moment, `seconds` converts it.

    `now` never waits: on CUDA, where kernels run after the host returns, it records an event on the current stream.
    """

    @abstractmethod
    def now(self) -> Any:
        """Return this moment."""

    @abstractmethod
    def seconds(self, moment: Any) -> float:
        """Return a moment as seconds since the clocks were made; waits until the device has reached it."""


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


# (stage, kind) -> seconds
Delays = Mapping[tuple[int, Kind], float]


class Span(NamedTuple):
    """One action of one rank, in seconds since the timeline began."""

    rank: int
    action: Action
    start: float
    end: float


class Watch:
    """Called by the executor of one rank: at the start of an action, after its waits, and at its end."""

    def __init__(self, rank: int, clock: Clock, delays: Delays) -> None:
        self.rank, self.clock, self.delays = rank, clock, delays
        self._start: Any = None
        self._spans: list[Span] = []
        # Start and end of actions, as moments of the clock: reading their seconds would wait for the device.
        self._moments: list[tuple[Action, Any, Any]] = []

    def start(self, action: Action) -> None:
        """Begin the time of `action` and sleep for its delay; other threads keep running."""
        self._start = self.clock.now()
        if delay := self.delays.get((action.stage, action.kind), 0.0):
            time.sleep(delay)

    def end(self, action: Action) -> None:
        """End the time of `action`: its messages, if any, are ready for their SEND."""
        self._moments.append((action, self._start, self.clock.now()))

    @property
    def spans(self) -> list[Span]:
        """Return the spans in the order of execution. Waits for the device: read it between steps."""
        seconds = self.clock.seconds
        for action, start, end in self._moments:
            self._spans.append(Span(self.rank, action, seconds(start), seconds(end)))
        self._moments.clear()
        return self._spans


class Timeline:
    """The spans of the ranks of this process; their clocks are given by rank."""

    def __init__(self, clocks: Mapping[int, Clock], delays: Delays | None = None) -> None:
        self.watches = {rank: Watch(rank, clock, delays or {}) for rank, clock in clocks.items()}

    @property
    def spans(self) -> tuple[Span, ...]:
        """Ranks ascending, each rank's in the order of execution."""
        return tuple(span for rank in sorted(self.watches) for span in self.watches[rank].spans)

    @property
    def makespan(self) -> float:
        """Seconds from the first start to the last end."""
        return max(span.end for span in self.spans) - min(span.start for span in self.spans)

    @property
    def bubble(self) -> float:
        """makespan / ideal - 1, where ideal is the busiest rank's own F, B and W: as in `schedule.Simulation`."""
        work = dict.fromkeys(self.watches, 0.0)
        for span in self.spans:
            if span.action.kind in COMPUTES:
                # Sends and receives are not work: as in the simulation, they only delay their receivers.
                work[span.rank] += span.end - span.start
        return self.makespan / max(work.values()) - 1
