"""Find the cheapest plan that fits into the memory of a rank, by what a byte is made to cost.

In: a function that solves for one price and raises `TooFull` where its plan does not fit. Out: its plan for the lowest price
that does, and the price: seconds per microbatch that a byte of a rank costs beside what it does anyhow (`ir/machine.py`).
A parameter counts four times (gradient and two moments), a byte saved for backward once for every microbatch in flight.

The rule: without an extra price first. Where that does not fit, at a price so high that seconds hardly count: where not even
that plan fits, it is refused. Between the two the price is bisected, by powers of two of what a link takes for a byte.

    plan, price = fit(solve, first=0.0, unit=1 / machine.link_bandwidth)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from autoptd.passes.cut import TooFull

LEAST, MOST = -4, 14  # powers of two: a sixteenth of a byte's time on a link, and 16384 bytes'
T = TypeVar("T")


def fit(solve: Callable[[float], T], first: float, unit: float) -> tuple[T, float]:
    """Return the plan of least price that fits, and the price; `first` is tried before all others. TooFull if none fits."""
    try:
        return solve(first), first
    except TooFull:
        found = solve(unit * 2**MOST)
    low, high, last = LEAST - 1, MOST, MOST
    while high - low > 1:
        last = (low + high) // 2
        try:
            found = solve(unit * 2**last)
        except TooFull:
            low = last
        else:
            high = last
    return (found if last == high else solve(unit * 2**high)), unit * 2**high


__all__ = ["fit"]
