"""The makespan of a schedule for given seconds per stage, by which the cut is chosen.

In: orders. Out: a function of the seconds that each stage takes for a microbatch (split 1 : 2 into forward
and backward; half of a backward is weight gradients if those are separate), and of the extra backward seconds
for recomputation. None for schedules that are too long to simulate many times.

    makespan_of(one_f_one_b(p=2, m=4))([3.0, 3.0], [0.0, 0.0])
    # 15.0
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autoptd.ir.actions import Action
from autoptd.schedule.simulate import Complete

# Longer schedules take over 30 ms per simulation.
MAX_ACTIONS = 10_000
# The simulation needs positive times.
MIN_SECONDS = 1e-12
MakespanOf = Callable[[Sequence[float], Sequence[float]], float]


def makespan_of(orders: Sequence[Sequence[Action]]) -> MakespanOf | None:
    """Return the makespan as a function of the seconds per stage and of the recomputation seconds.

    None for more than `MAX_ACTIONS` actions.
    """
    if sum(map(len, orders)) > MAX_ACTIONS:
        return None
    # Done once: it does not depend on durations.
    complete = Complete.of(orders)
    complete.check_messages()

    def makespan(stages: Sequence[float], again: Sequence[float]) -> float:
        third = [max(seconds, MIN_SECONDS) / 3 for seconds in stages]
        backward = [2 * seconds + more for seconds, more in zip(third, again, strict=True)]
        sweep = complete.run(third, backward, third)
        return max(ends[-1] for ends in sweep.ends)

    return makespan
