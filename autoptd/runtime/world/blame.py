"""Find the rank to blame for a failed call, from the last known state of the others.

In: a call of this rank, and the last two beats of every other rank (`faults.py`), or their pages where they are on this
machine. Out: the fact of a fault.

    blame = Blame(world, pages)
    blame.of_call(call, "F0.1", before, after)      # "rank 3 is gone: it was last known at B1.0"
    blame.of_scripts(script, beats)                 # "its script calls pm.save where that of rank 1 calls step"
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autoptd.runtime.world.calls import Call, ScriptCalls, describe, first_difference, listed, numbers
from autoptd.runtime.world.pages import Pages
from autoptd.runtime.world.recorder import ranges_text
from autoptd.runtime.world.world import World, fault_site

# Rank -> its last beat.
Beats = dict[int, dict[str, Any]]


class Blame:
    """Find the rank to blame, as seen by the rank of `world`; `pages` holds the calls noted on its machine,
    if any.
    """

    def __init__(self, world: World, pages: Pages | None) -> None:
        self._world, self._pages = world, pages

    def of_call(self, call: Call, at: str, before: Beats | None, after: Beats | None) -> str:
        """Name the rank that made another call, else the ranks that are gone (no beat in between) or in no
        call, else the position of each rank.
        """
        others = [rank for rank in range(self._world.mesh.size) if rank != self._world.rank]
        lasts = {rank: self.last_of(rank, after) for rank in others}
        for rank, (_, last) in lasts.items():
            if last is not None and call.differs(last):
                return self.other_call(call, rank, after, at)
        if after is not None and (left := [rank for rank in others if after[rank]["left"]]):
            return "; ".join(f"rank {rank} left: {after[rank]['left']}" for rank in left)
        if before is None or after is None:
            return self._of_lost_store(others, lasts)
        gone = [rank for rank in others if after[rank]["count"] == before[rank]["count"]]
        if gone:
            return describe(gone, lasts, "gone")
        hung = [rank for rank in others if not after[rank]["is_waiting"]]
        if hung:
            return describe(hung, {rank: (after[rank]["at"], None) for rank in hung}, "hung or slow")
        return describe(others, lasts, "waiting as well")

    def last_of(self, rank: int, beats: Beats | None) -> tuple[str, Call | None]:
        """Return what a rank was executing and its last call: from its page if it runs on this machine, else
        from its beat.
        """
        if self._pages is not None and (noted := self._pages.read(rank)) is not None:
            at, ranks, number, kind, site, nbytes = noted
            return at, Call(kind, site, numbers(ranks), int(number), int(nbytes))
        if beats is None or beats[rank]["call"] is None:
            return "start" if beats is None else beats[rank]["at"], None
        kind, site, ranks, number, nbytes = beats[rank]["call"]
        return beats[rank]["at"], Call(kind, site, tuple(ranks), number, nbytes)

    def other_call(self, call: Call, rank: int, beats: Beats | None = None, at: str | None = None) -> str:
        """Describe the different calls that two ranks of a group make in the same place."""
        their_at, last = self.last_of(rank, beats)
        mine = f"{fault_site(self._world.rank, at or self._world.at)}: {call}"
        theirs = f"{fault_site(rank, their_at)}: {last}"
        return f"call {call.number} of ranks {listed(call.ranks)} is not the same on {mine}, and {theirs}"

    def _of_lost_store(self, others: Sequence[int], lasts: dict[int, tuple[str, Call | None]]) -> str:
        """Name the dead ranks of this machine, and the ranks on machines that may be cut off."""
        lost = "the store does not answer: rank 0, or what else hosts the store, is gone, or this node is cut off"
        if self._pages is None:
            return lost
        elsewhere = [rank for rank in others if self._pages.read(rank) is None]
        if elsewhere:
            lost += f" from rank{'s' * (len(elsewhere) > 1)} {ranges_text(elsewhere)}"
        dead = [rank for rank in others if self._pages.is_dead(rank)]
        return "; ".join([describe(dead, lasts, "gone"), lost]) if dead else lost

    def of_scripts(self, script: ScriptCalls, beats: Beats) -> str:
        """Name the rank whose script makes a different call than this one's; "" if none does."""
        for rank, beat in beats.items():
            if found := first_difference(script, beat["script"]):
                number, mine, theirs = found
                return f"its script calls {mine} where that of rank {rank} calls {theirs} (call {number} of each)"
        return ""


__all__ = ["Beats", "Blame"]
