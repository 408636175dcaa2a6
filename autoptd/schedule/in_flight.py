"""Count the microbatches in flight on the stages of each rank at the moments of peak memory.

In: orders with at least F, B and W. Out: vectors with one number per stage (0 for stages of other ranks).
Moments that another moment of the rank exceeds on every stage are dropped.

    in_flight_moments(one_f_one_b(p=2, m=4))
    # [(2, 0), (0, 1)]
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

from autoptd.ir.actions import Action, Kind


def in_flight_moments(orders: Sequence[Sequence[Action]]) -> list[tuple[int, ...]]:
    """Return vectors of the microbatches in flight per stage: those whose F has begun and whose B (or W) has
    not ended.
    """
    last = Kind.W if any(Kind.W in map(itemgetter(0), order) for order in orders) else Kind.B
    count = 1 + max(max(map(itemgetter(1), order)) for order in orders if order)
    found: list[tuple[int, ...]] = []
    for order in orders:
        stages = sorted(set(map(itemgetter(1), order)))
        for live in _fullest(_moments(order, stages, last)):
            of_stage = dict(zip(stages, live, strict=True))
            found.append(tuple(of_stage.get(stage, 0) for stage in range(count)))
    return found


def _moments(order: Sequence[Action], stages: Sequence[int], last: Kind) -> set[tuple[int, ...]]:
    """Return the counts on these stages after each forward that is followed by a backward: in between, they
    only rise or fall.
    """
    place, first = {stage: i for i, stage in enumerate(stages)}, Kind.F
    live, moments, has_grown = [0] * len(stages), set(), False
    for kind, stage, _, _ in order:
        if kind is first:
            live[place[stage]] += 1
            has_grown = True
        elif kind is last:
            if has_grown:
                moments.add(tuple(live))
            live[place[stage]] -= 1
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
