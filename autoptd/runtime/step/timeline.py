"""Record when each rank executed each action, optionally with delays that simulate slower hardware.

In: the clocks of this process's ranks, and delays by (stage, kind). Out: a `Timeline` of `Span`s, one per action, with
one origin: when the host executed it or, on CUDA, the device (`world/clocks.py`). Waiting is not in the spans: an F or B
starts when its messages have arrived. Its delay comes next, before it computes or sends anything, so that it acts like
compute. Without a timeline the overhead is one comparison per action.

    with ranks.timed({(0, Kind.F): 0.02, (0, Kind.B): 0.04}) as timeline:
        ranks.run("step", step)
    timeline.makespan, timeline.bubble        # to be compared with those of `schedule.simulate`

Spans of several steps follow each other; `finish` and `bubble` cover the whole timeline, so time one step for them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from autoptd.ir.actions import COMPUTES, Action, Kind
from autoptd.runtime.world.clocks import Clock

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
