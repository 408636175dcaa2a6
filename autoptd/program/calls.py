"""List the communication calls that the compiler expects, in the same records as the executed ones.

In: a `Program`. Out: the number of times a rank makes each call in one training step or evaluation. The
runtime records the executed calls as the same `Call`s, so that the two can be compared as multisets.

    calls = expected_calls(program, rank=3)
    sum(times * call.wire_bytes for call, times in calls.items() if call.axis == "tp")

The payload is the whole value that a collective works on: a rank's input for an all-reduce, a broadcast and a
send, the parts of all ranks together for an all-gather, a reduce-scatter and an all-to-all. Sites name layers
by a star (`h.*.attn`), as a repeated layer is one line of the emitted file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from autoptd.errors import InternalError
from autoptd.ir.deadlock import find_deadlock
from autoptd.ir.mesh import Mesh, SubAxis, joined
from autoptd.ir.names import star
from autoptd.ir.types import LOCAL_KINDS, wire_bytes
from autoptd.program.buckets import BucketPlan
from autoptd.program.specs import Collective

if TYPE_CHECKING:
    from autoptd.program.program import Program


# What `autoptd plan` draws must not import torch, which a program needs.

# The conversion of a `Collective` that is repeated in backward, for a value that was not kept.
AGAIN = "computed again"


@dataclass(frozen=True)
class Call:
    """One collective or send in which `rank` takes part.

    `axis` names the mesh axes or sub-axes along which the ranks of the group differ: "tp", "dp", "dp x tp",
    "pp", "tp:(2)4". `phase` is "forward", "backward", "recompute" (in backward, for values that were not
    kept), or "step" for calls once per step, where `stage` is -1. `why` is not compared.
    """

    rank: int
    kind: str
    axis: str
    payload_bytes: int
    group_size: int
    phase: str
    stage: int
    site: str
    why: str = field(default="", compare=False)

    @property
    def wire_bytes(self) -> float:
        """Bytes that this rank sends over a ring: see `wire_bytes`."""
        return wire_bytes(self.kind, self.payload_bytes, self.group_size)


def axis_text(mesh: Mesh, ranks: Sequence[int]) -> str:
    """Name the mesh axes or sub-axes along which `ranks` differ: `dp x tp`, `tp:(2)4`."""
    places = [mesh.coordinate(rank) for rank in ranks]
    texts = []
    for axis in reversed(mesh.axes):
        along = sorted({place[axis] for place in places})
        degree = mesh.degree(axis)
        # Some of the coordinates of an axis, at equal distances, are a sub-axis of it.
        if axis not in mesh.stage_axes and 1 < len(along) < degree:
            factor = SubAxis(axis, degree // (len(along) * (along[1] - along[0])), len(along))
            texts.append(str(factor))
        elif len(along) > 1:
            texts.append(axis)
    return joined(texts)


def joint_axis(mesh: Mesh, axes: Sequence[str]) -> str:
    """Name some axes together, leaving out those of one rank, as `axis_text` does for a group along them."""
    return joined(axis for axis in reversed(mesh.axes) if axis in axes and mesh.degree(axis) > 1)


def call_site(collective: Collective) -> str:
    """Return the site of the calls of a collective, with layers as stars and without the source line."""
    return star(collective.site.partition(" (")[0]) or "model"


def expected_calls(
    program: Program, rank: int, *, training: bool = True, updating: bool = False
) -> Counter[Call]:
    """Return how often `rank` makes each call in one step (or one evaluation), according to the program.

    `updating`: include those of a parameter update after the step.
    """
    pipeline_rank = program.mesh.pipeline_rank_of(rank)
    calls: Counter[Call] = Counter()
    for collective in program.collectives:
        if pipeline_rank not in collective.pp_ranks or (collective.scope == "update" and not updating):
            continue
        is_once = collective.scope != "microbatch"
        for direction, kind in (("forward", collective.forward), ("backward", collective.backward)):
            # An evaluation has no backward, and sums no gradients.
            if kind in LOCAL_KINDS or (direction == "backward" and not training):
                continue
            phase = "recompute" if collective.conversion == AGAIN else direction
            call = Call(
                rank,
                kind,
                collective.axis,
                collective.payload_bytes,
                collective.group_size,
                phase=collective.scope if is_once else phase,
                stage=-1 if is_once else collective.stage,
                site=call_site(collective),
                why=collective.why,
            )
            times = collective.times if training else collective.evaluation_times
            calls[call] += times if is_once else program.num_microbatches
    return calls


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
            for axis, _ in plan.early if plan.sum_scope == "step" else ():
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
