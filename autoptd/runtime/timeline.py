"""When each rank did what, as it was executed; on request with every action held up, to stand for slower hardware.

In: the clocks of this process's ranks, and delays by (stage, kind). Out: a `Timeline` of `Span`s, one per action, with one
origin: when the host executed it or, on CUDA, the device (`clocks.py`). What a rank waits for is not in its spans: an F or B
starts when its messages have arrived. Its delay comes next, before it computes and before anything of it is sent, so that it
takes the place of compute. Without a timeline an executor pays one comparison per action.

    with ranks.timed({(0, Kind.F): 0.02, (0, Kind.B): 0.04}) as timeline:
        ranks.run("step", step)
    timeline.finish, timeline.bubble        # beside those of `schedule.simulate`

Spans of several steps follow each other; `finish` and `bubble` are of all that is in the timeline, so time one step for them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from autoptd.ir.actions import COMPUTES, Action, Kind
from autoptd.runtime.clocks import Clock

Delays = Mapping[tuple[int, Kind], float]  # (stage, kind) -> seconds


class Span(NamedTuple):
    """One action of one rank, in seconds since the timeline began."""

    rank: int
    action: Action
    start: float
    end: float


class Watch:
    """What the executor of one rank tells: an action has all that it waits for; an action is over."""

    def __init__(self, rank: int, clock: Clock, delays: Delays) -> None:
        self.rank, self.clock, self.delays = rank, clock, delays
        self._start: Any = None
        self._spans: list[Span] = []
        self._taken: list[tuple[Action, Any, Any]] = []  # moments of actions that have no span yet

    def start(self, action: Action) -> None:
        """The time of `action` begins; its delay passes in here, other threads go on meanwhile."""
        self._start = self.clock.now()
        if delay := self.delays.get((action.stage, action.kind), 0.0):
            time.sleep(delay)

    def end(self, action: Action) -> None:
        """`action` is done: its messages, if it made any, are ready for their SEND."""
        self._taken.append((action, self._start, self.clock.now()))

    @property
    def spans(self) -> list[Span]:
        """In the order of execution; to be asked between steps, as it waits for the device."""
        seconds = self.clock.seconds
        self._spans += [
            Span(self.rank, action, seconds(start), seconds(end)) for action, start, end in self._taken
        ]
        self._taken.clear()
        return self._spans


class Timeline:
    """The spans of the ranks of this process, whose clocks are given by rank."""

    def __init__(self, clocks: Mapping[int, Clock], delays: Delays | None = None) -> None:
        self.watches = {rank: Watch(rank, clock, delays or {}) for rank, clock in clocks.items()}

    @property
    def spans(self) -> tuple[Span, ...]:
        """Ranks ascending, each rank's in the order of execution."""
        return tuple(span for rank in sorted(self.watches) for span in self.watches[rank].spans)

    @property
    def finish(self) -> float:
        """Seconds from the first start to the last end."""
        return max(span.end for span in self.spans) - min(span.start for span in self.spans)

    @property
    def bubble(self) -> float:
        """finish / ideal - 1, where ideal is the busiest rank's own F, B and W: as in `schedule.Simulation`."""
        work = dict.fromkeys(self.watches, 0.0)
        for span in self.spans:
            if span.action.kind in COMPUTES:
                work[span.rank] += span.end - span.start
        return self.finish / max(work.values()) - 1
