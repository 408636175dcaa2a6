"""Operators that tensor parallelism could not split, and the reason: one record per operator, for people.

Fallback("transformer.h.0.attn", "aten.linear", "6 heads do not divide over t=4", "t in {1, 2, 3, 6}",
flops=1000)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Fallback:
    """An operator that is not split as expected: `site` is its module, `fact` the reason, `remedy` the way to
    split it.

    `flops` are forward FLOPs of whole tensors that every tensor rank repeats because of it; 0 if it is split
    in another way.
    """

    site: str
    op: str
    fact: str
    remedy: str
    flops: int = 0


def divisors(sizes: Iterable[int]) -> list[int]:
    """Return all numbers that divide at least one of `sizes`, ascending."""
    return sorted({k for size in sizes for k in range(1, size + 1) if size % k == 0})
