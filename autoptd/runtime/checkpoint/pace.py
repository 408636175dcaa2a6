"""Decide when a run saves: every n steps, or, with `every="auto"`, by Young's rule from measured times.

In: the time of each call of `Checkpointer.step`, and of the start and end of each save. Out: whether a save
is due. With "auto", rank 0 alone decides, by its clock; the others receive the decision with the loss of a
step (`Flags.due`), so that all save at the same step.

    pace = Pace("auto", mtbf=3.1)               # hours between two faults of the whole job
    pace.observe(is_busy=False)                 # at each step
    pace.wants                                  # true after FIRST_STEPS steps, which are timed

The cost of a save is the sum, over the steps from its start to the end of its write, of their excess over the
median step: the copy, and the slowdown by writing. The next save is due sqrt(2 * cost * mtbf) later, or when
the write ends.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

from autoptd.errors import PlanError

# Steps before the first save, and how many of the last steps and saves count.
FIRST_STEPS, LAST_STEPS, LAST_SAVES = 20, 100, 5


@dataclass
class Pace:
    """See the module's docstring; `mtbf` is in hours, and belongs to "auto"."""

    every: int | str
    mtbf: float | None = None
    clock: Callable[[], float] = time.monotonic
    # Seconds of steps without a save, and of saves: what each took from training, and how long its write was.
    steps: deque[float] = field(default_factory=lambda: deque(maxlen=LAST_STEPS))
    stalls: deque[float] = field(default_factory=lambda: deque(maxlen=LAST_SAVES))
    writes: deque[float] = field(default_factory=lambda: deque(maxlen=LAST_SAVES))
    _seen: float | None = None
    _extra: float = 0.0
    _begun: float | None = None
    _is_under_way: bool = False
    _has_reported: bool = False

    def is_due(self, step: int, decision: bool) -> bool:
        """Tell whether a save is due after a step; `decision` is the one that rank 0 sent with the loss."""
        return decision if isinstance(self.every, str) else step % self.every == 0

    def gap(self, step: int, last: int) -> int:
        """Return the number of steps between saves, which all ranks know; `last` is the step of the last save."""
        return step - last if isinstance(self.every, str) else self.every

    def observe(self, is_busy: bool) -> None:
        """Record the time at a step; `is_busy` tells whether a save is still being written."""
        now, before = self.clock(), self._seen
        self._seen = now
        if before is None:
            return
        if not self._is_under_way:
            self.steps.append(now - before)
            return
        self._extra += now - before - (median(self.steps) if self.steps else 0.0)
        if not is_busy:
            self.stalls.append(max(self._extra, 0.0))
            self.writes.append(now - (self._begun or now))
            self._is_under_way = False

    def begin(self) -> None:
        """Record the start of a save."""
        self._begun, self._extra, self._is_under_way = self.clock(), 0.0, True

    def forget(self) -> None:
        """Ignore the current save: training has waited for it, so its time says nothing about others."""
        self._is_under_way, self._seen = False, None

    @property
    def interval(self) -> float | None:
        """The seconds from one save to the next; None before one was measured."""
        if self.mtbf is None or not self.stalls:
            return None
        # Young's rule (Communications of the ACM 17, 1974), which loses the least time to saves and to repeated work.
        return max(math.sqrt(2 * median(self.stalls) * 3600 * self.mtbf), max(self.writes))

    @property
    def wants(self) -> bool:
        """Whether a save is due, by this process's clock."""
        if self.every != "auto" or self._is_under_way:
            return False
        if self.interval is None or self._begun is None:
            return len(self.steps) >= FIRST_STEPS
        return self.clock() - self._begun >= self.interval

    def news(self) -> str:
        """Return, once, the measured times and the resulting interval; "" otherwise."""
        if self._has_reported or self.interval is None or self.every != "auto":
            return ""
        self._has_reported = True
        return (
            f"a save takes {median(self.stalls):.3g} s from training: one every {self.interval:.3g} s, "
            f"about {max(1, round(self.interval / median(self.steps)))} steps"
        )


def checked_pace(every: int | str, keep: int | None, mtbf: float | None, site: str) -> Pace:
    """Return the requested pace; raise PlanError for invalid values of `every`, `keep` or `mtbf`."""
    for name, value in (("every", every), ("keep", keep)):
        # True is an int, and no number of steps.
        is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        is_left_open = value is None if name == "keep" else value == "auto"
        if not (is_count or is_left_open):
            raise PlanError(
                f"{site}({name}={value!r})", "not a number of at least 1", f"for example {name}=3"
            )
    if every == "auto" and mtbf is None:
        remedy = "mtbf=, the mean hours between two faults of the whole job"
        raise PlanError(f"{site}(every='auto')", "how often the run fails is not given", remedy)
    if mtbf is None:
        return Pace(every)
    if every != "auto":
        raise PlanError(f"{site}(mtbf={mtbf!r})", f"every={every} says how often to save", "every='auto'")
    if isinstance(mtbf, bool) or not isinstance(mtbf, (int, float)) or not 0 < mtbf < math.inf:
        raise PlanError(f"{site}(mtbf={mtbf!r})", "not a number of hours above 0", "for example mtbf=24")
    return Pace(every, float(mtbf))
