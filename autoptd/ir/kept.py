"""What a program keeps for backward, and what ranks paid to keep less: recompute="auto".

In: the result of `passes.keep`. Out: `Kept`, and the rows of `plan.json` that pin its rates.

    Rate(price=0.0, more=1e-9, share=0.25).of_layers(4)     # [1e-9, 0.0, 0.0, 0.0]
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from autoptd.errors import PlanError


class Rate(NamedTuple):
    """Seconds that a pipeline rank pays to keep a byte less of a microbatch.

    It pays `more` in the first `share` of every stage's layers, whose backward comes last, and `price` in the others.
    """

    price: float
    more: float
    share: float

    def of_layers(self, count: int) -> list[float]:
        """Return what each of a stage's layers pays."""
        # A quarter of four layers is one, whatever rounding says.
        dearer = math.ceil(self.share * count - 1e-9)
        return [self.more] * dearer + [self.price] * (count - dearer)


@dataclass(frozen=True)
class Kept:
    """Per stage: bytes kept of a microbatch, and seconds to make again what is not; per pipeline rank its rate ("auto")."""

    nbytes: tuple[int, ...]
    again: tuple[float, ...]
    rates: tuple[Rate, ...] = ()


def rows_of(rates: Sequence[Rate]) -> list[dict[str, Any]]:
    """Return rates as a plan has them."""
    return [{"rank": rank, **rate._asdict()} for rank, rate in enumerate(rates)]


def read_rates(rows: Sequence[Any]) -> tuple[Rate, ...]:
    """Return the rates in a plan; PlanError where these are none, or not of ranks 0, 1, ..."""
    rates = []
    for rank, row in enumerate(rows):
        numbers = row if isinstance(row, dict) else {}
        rate = [numbers.get(name) for name in Rate._fields]
        is_rate = set(numbers) == {"rank", *Rate._fields} and numbers["rank"] == rank
        if not is_rate or not all(isinstance(x, (int, float)) and x >= 0 for x in rate):
            remedy = f'{{"rank": {rank}, "price": 0.0, "more": 1e-9, "share": 0.25}}, seconds a byte; or leave "keep" out'
            raise PlanError("plan: keep", f"is {row!r} for pipeline rank {rank}", remedy)
        rates.append(Rate(*map(float, rate)))  # type: ignore[arg-type]
    return tuple(rates)


__all__ = ["Kept", "Rate", "read_rates", "rows_of"]
