"""Words of the report: ranks, times, bandwidths.

In: numbers. Out: text for people.

    ranks_text([0, 1, 2, 3, 7])     # "0-3, 7"
    seconds_text(3.12e-4)           # "312 us"
"""

from __future__ import annotations

from collections.abc import Sequence

from autoptd.wings.viz.words import count_text

MAX_RANGES = 8


def ranks_text(ranks: Sequence[int]) -> str:
    """List ranks, three and more in a row as a range; only the first ranges where they are many."""
    # [first, last] of each run: [[0, 3], [7, 7]].
    ranges: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if ranges and rank == ranges[-1][1] + 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    texts = [_range_text(*span) for span in ranges[:MAX_RANGES]]
    return ", ".join(texts) + (", ..." if len(ranges) > MAX_RANGES else "")


def _range_text(first: int, last: int) -> str:
    # Two in a row are no shorter as a range.
    if last - first > 1:
        return f"{first}-{last}"
    return str(first) if first == last else f"{first}, {last}"


def seconds_text(seconds: float) -> str:
    """Format seconds with a unit: `31 us`, `4.1 ms`."""
    for unit, factor in (("us", 1e6), ("ms", 1e3)):
        if seconds * factor < 1000:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s"


def bandwidth_text(bandwidth: float) -> str:
    """Format bytes/s with a decimal unit, as links are sold: `1.2 GB/s`."""
    return count_text(bandwidth, "B/s")


__all__ = ["bandwidth_text", "ranks_text", "seconds_text"]
