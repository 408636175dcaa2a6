"""Prove from the program that all members of a group make their calls in the same order.

In: the collectives, buckets and pipeline ranks of a program. Out: nothing, or an InternalError. On gloo,
calls in different orders end the processes; on NCCL they hang, or add up unrelated tensors.

A *row* is the sequence of lines that all ranks of one pipeline rank execute, in the same order. So calls of
groups within a row (over tp, over dp) are ordered if each has a fixed place in the row. Only a sum that a
hook starts within a backward has none: two tensor ranks may reach the hook before and after another call of
that backward. We prove that

1. such sums are over mesh axes without other calls during actions;
2. the calls of a group that spans rows (owners of a parameter, all ranks for the loss) come in one order on
   its rows;
3. rows that wait for each other in these calls all reach the end.

Sends and receives are proven by `schedule.simulate`: on every channel, receives are posted in the order of
the sends.

    check_call_order(program.collectives, buckets_of_rows, program.mesh)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from autoptd.errors import InternalError
from autoptd.ir.deadlock import find_deadlock
from autoptd.ir.mesh import Mesh
from autoptd.ir.types import LOCAL_KINDS
from autoptd.program.buckets import BucketPlan
from autoptd.program.specs import Collective


@dataclass(frozen=True)
class RowCall:
    """A call that the pipeline ranks `ranks` make together."""

    ranks: tuple[int, ...]
    site: str
    payload_bytes: int

    def __str__(self) -> str:
        return f"{self.site!r} of {self.payload_bytes} bytes over pipeline ranks {list(self.ranks)}"


def check_call_order(
    collectives: Sequence[Collective], buckets: Sequence[Sequence[BucketPlan]], mesh: Mesh
) -> None:
    """Raise InternalError unless all members of every group make the same calls in the same order: see the
    module.

    `buckets` has a list for every pipeline rank.
    """
    busy = _calls_in_actions(collectives)
    for rank, plans in enumerate(buckets):
        for plan in plans:
            for axis, _ in plan.early:
                if (rank, axis) in busy:
                    fact = f"may start in a backward of pipeline rank {rank}, which has calls over {axis}: {busy[rank, axis]}"
                    raise InternalError(plan.site, fact)
    rows = [_calls_between_rows(plans, mesh) for plans in buckets]
    if chain := find_deadlock(_joined(rows)):
        texts = [f"pipeline rank {rank} makes {call}" for rank, call in chain]
        raise InternalError("order of collectives", f"ranks wait for each other: {'; '.join(texts)}")


def _calls_in_actions(collectives: Sequence[Collective]) -> dict[tuple[int, str], str]:
    """Return the site of one collective that actions make, for every pipeline rank and mesh axis with one."""
    # Sends have their own channels, and do not block collectives.
    silent = {*LOCAL_KINDS, "send"}
    sites: dict[tuple[int, str], str] = {}
    for collective in collectives:
        if collective.scope == "microbatch" and not {collective.forward, collective.backward} <= silent:
            for rank in collective.pp_ranks:
                sites[rank, collective.axis] = collective.site
    return sites


def _calls_between_rows(plans: Sequence[BucketPlan], mesh: Mesh) -> list[RowCall]:
    """Return the calls that a row shares with others, after its last action: sums over owners, then the loss."""
    tied = sorted((plan for plan in plans if plan.tied), key=lambda plan: plan.number)
    # A row's last sum is the one over owners.
    sums = [RowCall(plan.owners, plan.tied_site, plan.summed_bytes(mesh)[-1]) for plan in tied]
    return [*sums, RowCall(tuple(range(mesh.pipeline_ranks)), "loss", 8)]


def _joined(rows: Sequence[Sequence[RowCall]]) -> list[list[RowCall]]:
    """Return the rows with one object per joint call, the k-th of a group; InternalError if these differ."""
    # By (ranks, k): the first row that makes the call, and its object.
    first: dict[tuple[tuple[int, ...], int], tuple[int, RowCall]] = {}
    joined: list[list[RowCall]] = []
    for rank, calls in enumerate(rows):
        count: Counter[tuple[int, ...]] = Counter()
        joined.append([])
        for call in calls:
            other, joint = first.setdefault((call.ranks, count[call.ranks]), (rank, call))
            count[call.ranks] += 1
            if joint != call:
                fact = f"pipeline rank {rank} makes {call} where pipeline rank {other} makes {joint}"
                raise InternalError("order of collectives", fact)
            joined[-1].append(joint)
    return joined
