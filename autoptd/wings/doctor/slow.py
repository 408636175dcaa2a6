"""Which group or channel is slow, beside the others of its kind.

In: times. Out: `Slow`s. Of a kind are calls of as many bytes by as many ranks on as many machines. One is
slow that takes more than `LIMITS` times the median of the others, and `MIN_EXCESS_SECONDS` seconds more: a
large message twice, a small one, which is mostly waiting for the processor, four times.

    find_slow([Timed("message", "pp", (0, 4), 1 << 23, 0.5, 1), Timed("message", "pp", (1, 5), ...), ...])
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from autoptd.program.calls import wire_bytes
from autoptd.wings.planner.measure import SIZES

LIMITS = {"small": 4.0, "large": 2.0}
# A difference below this is noise, whatever the factor.
MIN_EXCESS_SECONDS = 1e-4
MANY = 50
SMALL = SIZES[0]


@dataclass(frozen=True)
class Timed:
    """What a call of `nbytes` took: `kind` is that of a collective over an `axis`, or "message" of a pair's
    channel.
    """

    kind: str
    axis: str
    ranks: tuple[int, ...]
    nbytes: int
    seconds: float
    # How many machines the ranks are on.
    hosts: int

    @property
    def bandwidth(self) -> float:
        """Bytes/s that a rank sends over a ring, or through a channel."""
        name = {"message": "send"}.get(self.kind, self.kind.replace("_", "-"))
        # `nbytes` is one rank's part here.
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
    """Return the slow ones, each group or channel once; the worst first.

    A group is slow in most of its collectives, or not at all.
    """
    alike: dict[tuple[str, str, int, int, int], list[Timed]] = defaultdict(list)
    for timed in times:
        alike[timed.kind, timed.axis, timed.nbytes, len(timed.ranks), timed.hosts].append(timed)
    # The calls of one group or channel with one size.
    calls: dict[tuple[bool, str, tuple[int, ...], int], list[Slow]] = defaultdict(list)
    for some in alike.values():
        medians = _medians_of_others([timed.seconds for timed in some])
        for timed, usual in zip(some, medians, strict=True):
            slow = Slow(
                timed.kind, timed.axis, timed.ranks, timed.nbytes, timed.seconds, usual, len(some) - 1
            )
            calls[timed.kind == "message", timed.axis, timed.ranks, timed.nbytes].append(slow)
    worst: dict[tuple[bool, str, tuple[int, ...]], Slow] = {}
    for (is_message, axis, ranks, nbytes), found in calls.items():
        # The lower median of its collectives: one unlucky call does not make a group slow.
        slow = sorted(found, key=lambda slow: slow.factor)[(len(found) - 1) // 2]
        place = is_message, axis, ranks
        if _is_over(nbytes, slow.seconds, slow.usual) and (
            place not in worst or worst[place].factor < slow.factor
        ):
            worst[place] = slow
    return sorted(worst.values(), key=lambda slow: -slow.factor)


def _medians_of_others(seconds: Sequence[float]) -> list[float]:
    """Return for each one the median of the others; among many, one more or less is all the same."""
    if len(seconds) > MANY:
        return [median(seconds)] * len(seconds)
    medians = []
    for number, own in enumerate(seconds):
        others = [*seconds[:number], *seconds[number + 1 :]]
        medians.append(median(others or [own]))
    return medians


def suspects_of(slow: Sequence[Slow], times: Sequence[Timed], most: int) -> list[tuple[int, int]]:
    """Return the channels to time once more, each alone: the slowest ones, and of the same kind one that
    is not slow.
    """
    slow_pairs = [link.ranks for link in slow if link.kind == "message"][:most]
    hosts = {timed.ranks: timed.hosts for timed in times if timed.kind == "message"}
    # A pair that is not slow is timed alone, too: the others are compared with it.
    all_slow = {link.ranks for link in slow}
    suspects = list(slow_pairs)
    for count in {hosts[pair] for pair in slow_pairs}:
        usual = [pair for pair, number in hosts.items() if number == count and pair not in all_slow]
        suspects += usual[:1]
    return [(pair[0], pair[1]) for pair in suspects]


def is_slow(link: Slow, alone: Sequence[Timed]) -> bool:
    """Tell whether a slow channel is slow also with all others quiet.

    True of one that was not timed again.
    """
    mine = [other for other in alone if (other.ranks, other.nbytes) == (link.ranks, link.nbytes)]
    if not mine:
        return True
    others = [other for other in alone if other.nbytes == link.nbytes and other.ranks != link.ranks]
    usual = [other.seconds for other in others if other.hosts == mine[0].hosts]
    return not usual or _is_over(link.nbytes, mine[0].seconds, min(usual))


def _is_over(nbytes: int, seconds: float, usual: float) -> bool:
    limit = LIMITS["small" if nbytes <= SMALL else "large"]
    return seconds > limit * usual and seconds - usual > MIN_EXCESS_SECONDS


__all__ = ["Slow", "Timed", "find_slow", "is_slow", "suspects_of"]
