"""How long a schedule takes for given seconds per stage: what the cut is chosen by.

In: orders. Out: a function of the seconds that every stage takes for a microbatch, forward and backward (1 :
2, and where weight gradients are apart, half of the backward is theirs), and of those that backward takes
besides, to make again what was not kept. None for schedules that are too long to be run many times.

    makespan_of(one_f_one_b(p=2, m=4))([3.0, 3.0], [0.0, 0.0])
    # 15.0
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autoptd.ir.actions import Action
from autoptd.schedule.simulate import Complete

# A schedule of more actions takes over 30 ms a run.
MAX_ACTIONS = 10_000
# The simulation wants times above 0.
MIN_SECONDS = 1e-12
MakespanOf = Callable[[Sequence[float], Sequence[float]], float]


def makespan_of(orders: Sequence[Sequence[Action]]) -> MakespanOf | None:
    """Return the makespan as a function of the seconds of every stage, and of those to make values again.

    None for more than `MAX_ACTIONS` actions.
    """
    if sum(map(len, orders)) > MAX_ACTIONS:
        return None
    # What durations do not change is looked at once.
    complete = Complete.of(orders)
    complete.check_messages()

    def makespan(stages: Sequence[float], again: Sequence[float]) -> float:
        third = [max(seconds, MIN_SECONDS) / 3 for seconds in stages]
        backward = [2 * seconds + more for seconds, more in zip(third, again, strict=True)]
        sweep = complete.run(third, backward, third)
        return max(ends[-1] for ends in sweep.ends)

    return makespan
