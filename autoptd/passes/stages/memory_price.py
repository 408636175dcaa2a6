"""Find the cheapest plan that fits into the memory of a rank, by putting a price on bytes.

In: a function that solves for one price, or returns `TooFull` where its plan does not fit. Out: its plan for the lowest price
that does, and the price: extra seconds per microbatch for a byte of a rank, beside its usual cost (`ir/machine.py`). A
parameter counts four times (gradient and two moments), a byte saved for backward once for every microbatch in flight.

Where ranks choose by price what they keep (recompute="auto"), each pays what it takes to fit (`kept/keep.py`); the layout over
tp has one price for all.

First comes the plan without an extra price. If it does not fit, a price so high that seconds hardly count is tried: if not
even that plan fits, the model is refused. Between the two the price is bisected, in powers of two of the time that a byte
takes on a link.

    plan, price = find_memory_price(solve, first=0.0, unit=1 / machine.link_bandwidth)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from autoptd.passes.stages.held_bytes import TooFull

# The price is a power of two, times the time of a byte on a link: from a sixteenth of that to 16384 times.
MIN_POWER, MAX_POWER = -4, 14
T = TypeVar("T")


def find_memory_price(
    solve: Callable[[float], T | TooFull], first: float, unit: float
) -> tuple[T, float] | TooFull:
    """Return the plan of least price that fits, and its price in seconds per byte; TooFull, of the highest, if none fits.

    The price `first` is tried before all others; `unit` is the time of a byte on a link.
    """
    plan = solve(first)
    if not isinstance(plan, TooFull):
        return plan, first
    plan = solve(unit * 2**MAX_POWER)
    if isinstance(plan, TooFull):
        return plan
    too_low, fits, last = MIN_POWER - 1, MAX_POWER, MAX_POWER
    while fits - too_low > 1:
        last = (too_low + fits) // 2
        tried = solve(unit * 2**last)
        if isinstance(tried, TooFull):
            too_low = last
        else:
            plan, fits = tried, last
    # `solve` leaves a record of its last call: that must be the one whose plan is returned.
    if last != fits:
        solve(unit * 2**fits)
    return plan, unit * 2**fits


def prices_from(first: float, unit: float) -> tuple[float, ...]:
    """Return the prices at which a rank may choose what it keeps: the first one, and those above it that are tried."""
    ladder = (unit * 2**power for power in range(MIN_POWER, MAX_POWER + 1))
    return (first, *(each for each in ladder if each > first))


__all__ = ["find_memory_price", "prices_from"]
