"""Numbers whose right result is known on every rank: exact in any dtype that is sent, and different for every
rank and place.

In: who sends to whom, how many elements, of which dtype. Out: a tensor; and, of one that arrived, what is
wrong with it.

    got = group.all_reduce(share(group.index, group.size, 1021, torch.bfloat16, device), "sum")
    find_difference(got, total(group.size, 1021, torch.bfloat16, device), owners=True)      # None: it is right

All are whole numbers of at most 8 bits, so that bfloat16 holds them and their sums, in whatever order they
are added. Of a sum every even place has one rank that adds to it, its *owner*: a wrong one tells whose part
is wrong. Every odd place has many. A pattern repeats after a prime number of places: a piece that lands
elsewhere does not fit there.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

Tensor = torch.Tensor
# Primes: a piece that lands elsewhere does not fit there.
PERIODS = (1021, 4093, 16381, 65521)
# At most so many ranks add to an odd place: sums stay below 128.
TOGETHER = 60
MOVED_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool)
SUMMED_DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64)


@dataclass(frozen=True)
class Difference:
    """Of `count` elements `wrong` are not what they should be, the first at `place`.

    `owners`: whose they are, if known.
    """

    wrong: int
    count: int
    place: int
    got: float
    expected: float
    owners: tuple[int, ...] = ()

    def __str__(self) -> str:
        first = f"element {self.place} is {self.got:g}, not {self.expected:g}"
        return first if self.count == 1 else f"{self.wrong} of {self.count} elements; {first}"


def share(index: int, size: int, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return what rank `index` of `size` hands into a sum or a maximum."""
    return _laid(_share(index, size), count, dtype, device)


def total(size: int, count: int, dtype: torch.dtype, device: torch.device, op: str = "sum") -> Tensor:
    """Return the sum (`op="max"`: the maximum) of all shares."""
    return _laid(_total(size, op), count, dtype, device)


def message(
    source: int, target: int, count: int, dtype: torch.dtype, device: torch.device, number: int = 0
) -> Tensor:
    """Return what `source` sends to `target` in its message `number`."""
    places = torch.arange(PERIODS[0], device="cpu")
    # Ranks 251 apart would have the same offsets modulo 251: they have another factor.
    factor = 3 + (source // 251 + 5 * (target // 251)) % 97
    values = (places * factor + 17 * source + 29 * target + 101 * number) % 251 - 125
    return _laid(values % 3 == 0 if dtype is torch.bool else values, count, dtype, device)


def find_difference(got: Tensor, expected: Tensor, size: int = 0, offset: int = 0) -> Difference | None:
    """Find what is wrong with what arrived.

    Of a sum over `size` ranks, from its place `offset` on, also whose part is wrong.
    """
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return Difference(got.numel(), expected.numel(), 0, float("nan"), float("nan"))
    if torch.equal(got, expected):
        return None
    places = (got != expected).flatten().nonzero().flatten()
    first = int(places[0])
    owners: set[int] = set()
    if size:
        owners = set(map(int, _owners((places + offset) % period_of(size), size)))
    values = float(got.flatten()[first]), float(expected.flatten()[first])
    return Difference(len(places), got.numel(), first, *values, tuple(sorted(owners)))


def period_of(size: int) -> int:
    """Return the places after which the shares of `size` ranks repeat: each rank owns one at least."""
    return next((period for period in PERIODS if period >= 2 * size + 2), PERIODS[-1])


@lru_cache(maxsize=64)
def _share(index: int, size: int) -> Tensor:
    places = torch.arange(period_of(size), device="cpu")
    # Even places: 2k has the owner k % size, whose number is 1 to 7; on other ranks it is 0.
    alone = torch.where(places // 2 % size == index, 1 + places // 2 % 7, 0)
    together = torch.where((places + index) % size < TOGETHER, (7 * places + 13 * index) % 5 - 2, 0)
    return torch.where(places % 2 == 0, alone, together)


@lru_cache(maxsize=16)
def _total(size: int, op: str) -> Tensor:
    """Add up all `_share`s: for each odd place only those ranks are looked at that add to it."""
    places = torch.arange(period_of(size), device="cpu")
    found = torch.zeros_like(places) if op == "sum" or size > TOGETHER else torch.full_like(places, -2)
    for number in range(min(size, TOGETHER)):
        # The ranks that add to a place are those with (place + rank) % size < TOGETHER: `number` counts them.
        part = (7 * places + 13 * ((number - places) % size)) % 5 - 2
        found = found + part if op == "sum" else torch.maximum(found, part)
    return torch.where(places % 2 == 0, 1 + places // 2 % 7, found)


def _owners(places: Tensor, size: int) -> Tensor:
    """Return the owners of those places that have one."""
    return (places[places % 2 == 0] // 2 % size).unique()


def _laid(pattern: Tensor, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return `count` elements of a pattern, over and over."""
    # Rounded up, then cut.
    times = -(-count // len(pattern))
    return pattern.to(device, dtype).repeat(times)[:count]


__all__ = ["MOVED_DTYPES", "SUMMED_DTYPES", "Difference", "find_difference", "message", "share", "total"]
