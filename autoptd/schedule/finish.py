"""How long a schedule takes for given seconds per stage: what the cut is chosen by.

In: orders. Out: a function of the seconds that every stage takes for a microbatch, forward and backward (1 : 2, and where
weight gradients are apart, half of the backward is theirs). None for schedules that are too long to be run many times.

    finish_of(one_f_one_b(p=2, m=4))([3.0, 3.0])
    # 15.0
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autoptd.ir.actions import Action
from autoptd.schedule.simulate import simulate

# Actions: up to 30 ms a run.
LONGEST = 10_000
# Seconds: the simulation wants positive ones.
LEAST = 1e-12


def finish_of(orders: Sequence[Sequence[Action]]) -> Callable[[Sequence[float]], float] | None:
    """The function, or None."""
    if sum(map(len, orders)) > LONGEST:
        return None

    def finish(stages: Sequence[float]) -> float:
        third = [max(one, LEAST) / 3 for one in stages]
        backward = [2 * one for one in third]
        return simulate(orders, forward=third, backward=backward, weight_gradient=third).finish

    return finish
