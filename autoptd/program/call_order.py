"""The order in which ranks make their calls: that all members of a group have the same, proven from the program.

In: the collectives, buckets and pipeline ranks of a program. Out: nothing, or an InternalError. On gloo, calls in different
orders end the processes; on NCCL they hang, or add up what does not belong together.

A *row* is what all ranks of one pipeline rank do: the same lines in the same order. So calls of groups that lie within a row
(over tp, over dp) come in one order if each has a fixed place in the row. Only a sum that a hook starts within a backward has
none: two tensor ranks may reach the hook with other calls of that backward in between. What is proven:

1. such sums are over mesh axes that carry nothing else during actions;
2. the calls of a group that spans rows (owners of a parameter, everyone for the loss) come in one order on all its rows;
3. rows that wait for each other in these calls all come to the end.

Sends and receives are proven by `schedule.simulate`: on every channel, receives are posted in the order of the sends.

    check_call_order(program.collectives, buckets_of_rows, program.mesh)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from autoptd.errors import InternalError
from autoptd.ir.mesh import Mesh
from autoptd.program.buckets import BucketPlan
from autoptd.program.calls import LOCAL_KINDS
from autoptd.program.specs import Collective


class Joint(Protocol):
    """A call that several ranks make together; the same object for all of them."""

    @property
    def ranks(self) -> tuple[int, ...]: ...


Call = TypeVar("Call", bound=Joint)


def find_deadlock(issued: Sequence[Sequence[Call]]) -> list[tuple[int, Call]]:
    """Let every rank make its calls one after the other, each with all of its ranks; return who got stuck in which call.

    A list of (rank, its call), each waiting for the next; the last one waits for one before it, or for a rank that has ended.
    """
    place = [0] * len(issued)
    arrived: dict[int, int] = {}
    ready = list(range(len(issued)))
    while ready:
        rank = ready.pop()
        if place[rank] == len(issued[rank]):
            continue
        call = issued[rank][place[rank]]
        arrived[id(call)] = arrived.get(id(call), 0) + 1
        if arrived[id(call)] == len(call.ranks):  # the last one to arrive takes all of them on
            for one in call.ranks:
                place[one] += 1
            ready += call.ranks
    stuck = {rank: issued[rank][at] for rank, at in enumerate(place) if at < len(issued[rank])}
    chain: dict[int, Call] = {}
    following = next(iter(stuck), None)
    while following is not None and following not in chain:
        chain[following] = call = stuck[following]
        following = next((one for one in call.ranks if one in stuck and stuck[one] is not call), None)
    return list(chain.items())


@dataclass(frozen=True)
class RowCall:
    """A call of a group that spans pipeline ranks: those of `ranks` make it together."""

    ranks: tuple[int, ...]
    site: str
    payload_bytes: int

    def __str__(self) -> str:
        return f"{self.site!r} of {self.payload_bytes} bytes over pipeline ranks {list(self.ranks)}"


def check_call_order(
    collectives: Sequence[Collective], buckets: Sequence[Sequence[BucketPlan]], mesh: Mesh
) -> None:
    """InternalError unless all members of every group make the same calls in the same order: see the module.

    `buckets` are those of every pipeline rank.
    """
    busy = _calls_in_actions(collectives)
    for pp, plans in enumerate(buckets):
        for plan in plans:
            for axis, _ in plan.early:
                if (pp, axis) in busy:
                    fact = f"may start in a backward of pipeline rank {pp}, which has calls over {axis}: {busy[pp, axis]}"
                    raise InternalError(plan.site, fact)
    rows = [_calls_between_rows(plans, mesh) for plans in buckets]
    made = _joined(rows)
    if chain := find_deadlock(made):
        texts = [f"pipeline rank {pp} makes {call}" for pp, call in chain]
        raise InternalError("order of collectives", f"ranks wait for each other: {'; '.join(texts)}")


def _calls_in_actions(collectives: Sequence[Collective]) -> dict[tuple[int, str], str]:
    """For (pipeline rank, mesh axis), the site of a collective that its actions make over that axis, if there is one."""
    silent = {*LOCAL_KINDS, "send"}
    return {
        (pp, one.axis): one.site
        for one in collectives
        if one.scope == "microbatch" and not {one.forward, one.backward} <= silent
        for pp in one.pp_ranks
    }


def _calls_between_rows(plans: Sequence[BucketPlan], mesh: Mesh) -> list[RowCall]:
    """What a row makes with others, after its last action: sums over owners in the order of the program, then the loss."""
    tied = sorted((plan for plan in plans if plan.tied), key=lambda plan: plan.number)
    sums = [RowCall(plan.owners, plan.tied_site, plan.nbytes(mesh)) for plan in tied]
    return [*sums, RowCall(tuple(range(mesh.pipeline_ranks)), "loss", 8)]


def _joined(rows: Sequence[Sequence[RowCall]]) -> list[list[RowCall]]:
    """The rows, with one object for what they make together: the k-th calls of a group. They must be equal."""
    first: dict[tuple[tuple[int, ...], int], tuple[int, RowCall]] = {}
    joined: list[list[RowCall]] = []
    for pp, calls in enumerate(rows):
        count: Counter[tuple[int, ...]] = Counter()
        joined.append([])
        for call in calls:
            other, made = first.setdefault((call.ranks, count[call.ranks]), (pp, call))
            count[call.ranks] += 1
            if made != call:
                fact = f"pipeline rank {pp} makes {call} where pipeline rank {other} makes {made}"
                raise InternalError("order of collectives", fact)
            joined[-1].append(made)
    return joined
