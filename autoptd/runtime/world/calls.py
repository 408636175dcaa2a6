"""Describe the calls that a rank makes together with others, for errors.

In: the numbered calls of one rank: collectives, and calls by the script (`pm.save`, `pm.step`). Out: texts;
and whether two ranks make different calls in the same place.

    call.differs(other)                                                   # call 17 of one group is not the same on both
    first_difference([(6, "step"), (7, "save")], [(7, "step")])           # (7, "save", "step")
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

# (number, what): the last calls of a rank's script, ascending.
ScriptCalls = tuple[tuple[int, str], ...]
# Number of calls kept: more than one rank can be ahead of another.
KEPT = 8


class Call(NamedTuple):
    """A call that a rank makes together with others: call number `number` of the group of `ranks`, or a
    message of a channel.
    """

    kind: str
    site: str
    ranks: tuple[int, ...] = ()
    number: int = 0
    # Bytes that this rank hands in; -1 where they may differ from rank to rank.
    nbytes: int = -1

    @property
    def place(self) -> tuple[object, ...]:
        """Return the position of the call in its group."""
        return self.ranks, self.number

    @property
    def form(self) -> tuple[object, ...]:
        """Return the properties that must agree on all ranks that make the call."""
        return self.kind, self.site, self.nbytes

    def __str__(self) -> str:
        size = f" of {self.nbytes} bytes" if self.nbytes >= 0 else ""
        return f"{self.kind} {self.site!r}{size}"

    def differs(self, other: Call) -> bool:
        """Tell whether both are the same call of their group, but with different properties."""
        return self.number > 0 and self.place == other.place and self.form != other.form


def first_difference(mine: ScriptCalls, theirs: ScriptCalls) -> tuple[int, str, str] | None:
    """Return (number, mine, theirs) of the first call that two ranks' scripts make differently; None where they agree."""
    known = dict(theirs)
    for number, what in mine:
        if known.get(number, what) != what:
            return number, what, known[number]
    return None


def numbers(text: str) -> tuple[int, ...]:
    """Parse ranks: return (0, 2) for "(0, 2)"."""
    return tuple(int(part) for part in text.strip("()").split(",") if part.strip())


def describe(ranks: Sequence[int], lasts: dict[int, tuple[str, Call | None]], what: str) -> str:
    texts = []
    for rank in ranks:
        at, call = lasts[rank]
        texts.append(f"rank {rank} is {what}: it was last known at {at}" + (f" in {call}" if call else ""))
    return "; ".join(texts)


def listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


__all__ = ["KEPT", "Call", "ScriptCalls", "describe", "first_difference", "listed", "numbers"]
