"""Find ranks that wait for each other: simulate calls that several ranks make together.

In: every rank's calls, in order. Out: a chain of ranks that wait for each other, or nothing. The compiler checks the
order of a program's calls with it (`program/calls.py`), ranks as threads the order of those that they made.

    find_deadlock([[a, b], [b, a]])     # [(0, a), (1, b)]: rank 0 waits in `a` for rank 1, which waits in `b`
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar


class Joint(Protocol):
    """A call that several ranks make together, represented by one object for all of them."""

    @property
    def ranks(self) -> tuple[int, ...]: ...


Call = TypeVar("Call", bound=Joint)


def find_deadlock(issued: Sequence[Sequence[Call]]) -> list[tuple[int, Call]]:
    """Simulate ranks that make their calls in order, each jointly with all of its ranks; return a chain of
    stuck ranks.

    The chain has pairs (rank, its call), each waiting for the rank of the next pair; the last one waits for
    an earlier rank, or for one that has ended. The list is empty if all ranks reach the end.
    """
    # Index of each rank's next call, and the number of ranks that have arrived at a call.
    place = [0] * len(issued)
    arrived: dict[int, int] = {}
    ready = list(range(len(issued)))
    while ready:
        rank = ready.pop()
        if place[rank] == len(issued[rank]):
            continue
        call = issued[rank][place[rank]]
        arrived[id(call)] = arrived.get(id(call), 0) + 1
        # The last one to arrive completes the call for all of its ranks.
        if arrived[id(call)] == len(call.ranks):
            for member in call.ranks:
                place[member] += 1
            # Those that arrived earlier had left `ready`.
            ready += call.ranks
    stuck = {rank: issued[rank][index] for rank, index in enumerate(place) if index < len(issued[rank])}
    # Follow the waits from any stuck rank.
    chain: dict[int, Call] = {}
    following = next(iter(stuck), None)
    while following is not None and following not in chain:
        chain[following] = call = stuck[following]
        missing = [member for member in call.ranks if member in stuck and stuck[member] is not call]
        following = missing[0] if missing else None
    return list(chain.items())
