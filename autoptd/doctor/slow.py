"""Which group or channel is slow, beside the others of its kind.

In: times. Out: `Slow`s. Of a kind are calls of as many bytes by as many ranks on as many machines. One is slow that
takes more than `LIMITS` times the median of the others, and `LEAST` seconds more: a large message twice, a small one,
which is mostly waiting for the processor, four times.

    find_slow([Timed("message", "pp", (0, 4), 1 << 23, 0.5, 1), Timed("message", "pp", (1, 5), 1 << 23, 0.1, 1), ...])
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from autoptd.planner.measure import SIZES
from autoptd.program.calls import wire_bytes

LIMITS = {"small": 4.0, "large": 2.0}
# Seconds.
LEAST = 1e-4
MANY = 50
SMALL = SIZES[0]


@dataclass(frozen=True)
class Timed:
    """What a call of `nbytes` took: `kind` is that of a collective over an `axis`, or "message" of a pair's channel."""

    kind: str
    axis: str
    ranks: tuple[int, ...]
    nbytes: int
    seconds: float
    # That the ranks are on.
    hosts: int

    @property
    def bandwidth(self) -> float:
        """Bytes/s that a rank sends over a ring, or through a channel."""
        name = {"message": "send"}.get(self.kind, self.kind.replace("_", "-"))
        # Of all ranks together.
        payload = self.nbytes * (len(self.ranks) if self.kind == "all_to_all" else 1)
        return wire_bytes(name, payload, len(self.ranks)) / self.seconds


@dataclass(frozen=True)
class Slow:
    """A group or channel whose call took `seconds`, where the median of `others` of its kind took `usual`."""

    kind: str
    axis: str
    ranks: tuple[int, ...]
    nbytes: int
    seconds: float
    usual: float
    others: int

    @property
    def factor(self) -> float:
        return self.seconds / self.usual


def find_slow(times: Sequence[Timed]) -> list[Slow]:
    """The slow ones, each group or channel once; the worst first. A group is slow in most of its collectives, or not at all."""
    alike: dict[tuple[str, str, int, int, int], list[Timed]] = defaultdict(list)
    for one in times:
        alike[one.kind, one.axis, one.nbytes, len(one.ranks), one.hosts].append(one)
    # Of one group or channel, of a size.
    calls: dict[tuple[bool, str, tuple[int, ...], int], list[Slow]] = defaultdict(list)
    for some in alike.values():
        for one, usual in zip(some, _medians_of_others([one.seconds for one in some]), strict=True):
            slow = Slow(one.kind, one.axis, one.ranks, one.nbytes, one.seconds, usual, len(some) - 1)
            calls[one.kind == "message", one.axis, one.ranks, one.nbytes].append(slow)
    worst: dict[tuple[bool, str, tuple[int, ...]], Slow] = {}
    for (is_message, axis, ranks, nbytes), found in calls.items():
        slow = sorted(found, key=lambda one: one.factor)[(len(found) - 1) // 2]
        place = is_message, axis, ranks
        if _is_over(nbytes, slow.seconds, slow.usual) and (place not in worst or worst[place].factor < slow.factor):
            worst[place] = slow
    return sorted(worst.values(), key=lambda one: -one.factor)


def _medians_of_others(seconds: Sequence[float]) -> list[float]:
    """For each one the median of the others; among many, one more or less is all the same."""
    if len(seconds) > MANY:
        return [median(seconds)] * len(seconds)
    return [median([*seconds[:number], *seconds[number + 1 :]] or [one]) for number, one in enumerate(seconds)]


def suspects_of(slow: Sequence[Slow], times: Sequence[Timed], most: int) -> list[tuple[int, int]]:
    """The channels to time once more, each alone: the slowest ones, and of the same kind one that is not."""
    slow_pairs = [one.ranks for one in slow if one.kind == "message"][:most]
    hosts = {one.ranks: one.hosts for one in times if one.kind == "message"}
    all_slow = {one.ranks for one in slow}
    usual = [
        next((pair for pair, number in hosts.items() if number == count and pair not in all_slow), None)
        for count in {hosts[pair] for pair in slow_pairs}
    ]
    return [(pair[0], pair[1]) for pair in (*slow_pairs, *usual) if pair is not None]


def is_slow(one: Slow, alone: Sequence[Timed]) -> bool:
    """Whether a slow channel is slow also with all others quiet; true of one that was not timed again."""
    mine = [other for other in alone if (other.ranks, other.nbytes) == (one.ranks, one.nbytes)]
    if not mine:
        return True
    usual = [
        other.seconds
        for other in alone
        if other.nbytes == one.nbytes and other.ranks != one.ranks and other.hosts == mine[0].hosts
    ]
    return not usual or _is_over(one.nbytes, mine[0].seconds, min(usual))


def _is_over(nbytes: int, seconds: float, usual: float) -> bool:
    limit = LIMITS["small" if nbytes <= SMALL else "large"]
    return seconds > limit * usual and seconds - usual > LEAST


__all__ = ["Slow", "Timed", "find_slow", "is_slow", "suspects_of"]
