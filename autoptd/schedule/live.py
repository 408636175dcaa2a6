"""How many microbatches are in flight on the stages of each rank, at the moments when they are most.

In: orders, of F, B and W at least. Out: vectors of one number per stage, of one rank's stages each (the others are 0). Of two
moments of a rank where one has no fewer on any stage, only that one is kept.

    live_moments(one_f_one_b(p=2, m=4))
    # [(2, 0), (0, 1)]
"""

from __future__ import annotations

from collections.abc import Sequence

from autoptd.ir.actions import Action, Kind


def live_moments(orders: Sequence[Sequence[Action]]) -> list[tuple[int, ...]]:
    """Microbatches whose F has begun and whose B (W, where there is one) has not ended, per stage."""
    count = 1 + max(action.stage for order in orders for action in order)
    last = Kind.W if any(action.kind is Kind.W for order in orders for action in order) else Kind.B
    return [moment for order in orders for moment in _fullest(_moments(order, count, last))]


def _moments(order: Sequence[Action], count: int, last: Kind) -> set[tuple[int, ...]]:
    """What is in flight behind every forward that a backward follows."""
    live, found, has_grown = [0] * count, set(), False
    for action in order:
        if action.kind is Kind.F:
            live[action.stage] += 1
            has_grown = True
        elif action.kind is last:
            if has_grown:
                found.add(tuple(live))
            live[action.stage] -= 1
            has_grown = False
    return found


def _fullest(moments: set[tuple[int, ...]]) -> list[tuple[int, ...]]:
    kept: list[tuple[int, ...]] = []
    for one in sorted(moments, key=lambda one: (-sum(one), one)):
        if not any(all(a >= b for a, b in zip(other, one, strict=True)) for other in kept):
            kept.append(one)
    return kept
