"""Count the microbatches in flight on the stages of each rank at the moments of peak memory.

In: orders with at least F, B and W. Out: vectors with one number per stage (0 for stages of other ranks).
Moments that another moment of the rank exceeds on every stage are dropped.

    in_flight_moments(one_f_one_b(p=2, m=4))
    # [(2, 0), (0, 1)]
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from autoptd.ir.actions import Action, Kind


def in_flight_moments(orders: Sequence[Sequence[Action]]) -> list[tuple[int, ...]]:
    """Return vectors of the microbatches in flight per stage: those whose F has begun and whose B (or W) has
    not ended.
    """
    actions = list(chain.from_iterable(orders))
    count = 1 + max(action.stage for action in actions)
    last = Kind.W if any(action.kind is Kind.W for action in actions) else Kind.B
    moments: list[tuple[int, ...]] = []
    for order in orders:
        moments += _fullest(_moments(order, count, last))
    return moments


def _moments(order: Sequence[Action], count: int, last: Kind) -> set[tuple[int, ...]]:
    """Return the counts after each forward that is followed by a backward: in between, they only rise or
    fall.
    """
    live, moments, has_grown = [0] * count, set(), False
    for action in order:
        if action.kind is Kind.F:
            live[action.stage] += 1
            has_grown = True
        elif action.kind is last:
            if has_grown:
                moments.add(tuple(live))
            live[action.stage] -= 1
            has_grown = False
    return moments


def _fullest(moments: set[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Drop moments at which no stage has more in flight than at some other moment."""
    kept: list[tuple[int, ...]] = []
    for moment in sorted(moments, key=lambda moment: (-sum(moment), moment)):
        if not any(_covers(other, moment) for other in kept):
            kept.append(moment)
    return kept


def _covers(moment: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return all(a >= b for a, b in zip(moment, other, strict=True))
