"""The gradients of one bucket on one rank, summed once per step or several times.

In: a planned bucket. Out: `Bucket`, a flat buffer into which autograd adds, whose sum starts when it is complete; and with
ZeRO's stages 2 and 3 `ScatteredBucket`, whose gradients are reduced whenever a backward has left them.

    bucket.begin(); ...; bucket.start(); bucket.start_late(); bucket.result()      # {"h.0.ln_1.weight": sum}
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from autoptd.ir.placement import AxisConversion
from autoptd.program.buckets import BucketPlan
from autoptd.runtime.params.parts import dtype_of
from autoptd.runtime.world.world import Done, Group, Pending, World


class Holder(Protocol):
    """The parameters of a rank: `RankParameters`."""

    world: World
    leaves: dict[str, torch.Tensor]
    local: Any

    def pieces_of(self, name: str, range_: torch.Tensor) -> dict[str, torch.Tensor]: ...


StartSum = Callable[[torch.Tensor, str], Pending]


def _all_reduce(group: Group, plan: BucketPlan) -> StartSum:
    # Looked up at each call, since a recording replaces the group's methods.
    return lambda flat, site: group.all_reduce_start(flat, site)


def _reduce_scatter(group: Group, plan: BucketPlan) -> StartSum:
    wire, sums = (dtype_of(name) for name in (plan.scattered_dtype, plan.params[0].storage.sum_dtype))

    def start(flat: torch.Tensor, site: str) -> Pending:
        return group.reduce_scatter_start(flat.to(wire), 0, site, None if wire == sums else sums)

    return start


# By the backward of a conversion: the function that starts it on a flat buffer of gradients.
START = {"all-reduce": _all_reduce, "reduce-scatter": _reduce_scatter}


def _bound(sums: Sequence[AxisConversion], plan: BucketPlan, world: World) -> list[StartSum]:
    """Return the functions that start these sums of a bucket on this rank's groups."""
    return [START[step.row.backward](world.group(step.axes), plan) for step in sums]


class Bucket:
    """The gradients of a planned bucket, on one rank: views of a flat buffer, into which autograd adds.

    Call `begin`, `start`, `start_late` and `result`, in this order.
    """

    def __init__(self, plan: BucketPlan, params: Holder) -> None:
        world = params.world
        self.number, self.specs = plan.number, plan.params
        self.site, self.tied_site = plan.site, plan.tied_site
        self.params, self.owners = params, world.owners(plan.owners)
        self.early, self.late = _bound(plan.early, plan, world), _bound(plan.late, plan, world)
        self.is_tied = bool(plan.tied)
        self.places, self.numel = plan.places(world.mesh), plan.numel(world.mesh)
        self.is_shared = bool(plan.sharing_axes)
        # Called with this rank's gradients before they are summed; set by `check_ranks`.
        self.note: Callable[[str, torch.Tensor], None] | None = None
        # Parameters that got a gradient on this rank in any step (fixed by the program), and on any owner.
        self.present: set[str] = set()
        self.present_anywhere: set[str] | None = None
        self.forget()

    def forget(self) -> None:
        """Reset the bucket, and free the gradients of the last step."""
        # Parameters whose gradient is not complete yet.
        self.incomplete = {spec.name for spec in self.specs}
        self.flat: torch.Tensor | None = None
        self.pending: Pending | None = None
        # Of the sums of this rank.
        self.held_bytes = 0

    def begin(self) -> None:
        """Point the `.grad` of every leaf into a zeroed buffer that accumulates this step's gradients."""
        leaves = self.params.leaves
        first = leaves[self.specs[0].name]
        self.flat = torch.zeros(self.numel, dtype=first.grad_dtype or first.dtype, device=first.device)
        for spec, start, end in self.places:
            leaf = leaves[spec.name]
            leaf.grad = self.flat[start:end].view(leaf.shape)

    def start(self) -> None:
        """Start the sum of the complete gradients over the early axes; a missing one counts as zeros."""
        assert self.flat is not None
        for spec, start, end in self.places:
            leaf = self.params.leaves[spec.name]
            # Autograd replaces a gradient where it cannot add in place.
            if leaf.grad is not None and leaf.grad.data_ptr() != self.flat[start:].data_ptr():
                self.flat[start:end].copy_(leaf.grad.reshape(-1))
            leaf.grad = None
        if self.note is not None:
            for spec, start, end in self.places:
                self.note(spec.name, self.flat[start:end])
        self.pending = self._start_sums(self.early, Done(self.flat))
        self.flat = None

    def start_late(self) -> None:
        """Wait for the sum over the early axes and start the others, after the last action."""
        assert self.pending is not None
        self.pending = self._start_sums(self.late, self.pending)

    def _start_sums(self, sums: Sequence[StartSum], pending: Pending) -> Pending:
        """Chain the sums: each waits for the previous one, and the last one is still running on return."""
        for start in sums:
            pending = start(pending.wait(), self.site)
        return pending

    def result(self) -> dict[str, torch.Tensor]:
        """Wait, and return by name the sums of this rank's stored parameters, if any rank has a gradient.

        The sum over owners is blocking.
        """
        assert self.pending is not None
        summed = self.pending.wait()
        self.held_bytes = summed.nbytes
        if self.is_tied:
            summed = self.owners.all_reduce(summed, self.tied_site)
        exists = self._present_on_owners() if self.is_tied else self.present
        if self.is_shared:
            named = self.params.pieces_of(self.specs[0].name, summed)
        else:
            named = {}
            for spec, start, end in self.places:
                named[spec.name] = summed[start:end].view(self.params.local[spec.name].shape)
        return {name: x for name, x in named.items() if name in exists}

    def _present_on_owners(self) -> set[str]:
        """Return the parameters with a gradient on any owner; exchanged once, since they never change."""
        if self.present_anywhere is None:
            everywhere = self.owners.gather_objects(self.present, f"{self.tied_site}: which exist")
            self.present_anywhere = set().union(*everywhere)
        return self.present_anywhere


class ScatteredBucket(Bucket):
    """A bucket whose gradients are reduced several times per step, so that no rank holds all of them until its end.

    Call `begin`; `flush` as often as gradients are to be reduced; and `start`, `start_late` and `result`.
    """

    def __init__(self, plan: BucketPlan, params: Holder, stages: Sequence[int]) -> None:
        # The stages of this rank that use it; how often one backward adds to each gradient.
        self.stages = frozenset(stages)
        self.is_counted = len(self.stages) == 1
        self._adds = {spec.name: spec.adds_in(stages[0]) for spec in plan.params} if self.is_counted else {}
        self.scope = plan.sum_scope
        super().__init__(plan, params)

    def forget(self) -> None:
        super().forget()
        self.incomplete = set()
        self._sum: torch.Tensor | None = None
        self._running: Pending | None = None
        self._left = dict(self._adds)
        # Whether a backward of its stages has run since the last reduction.
        self.is_touched = False
        # Of its gradients before they are reduced.
        self.whole_bytes = 0

    def begin(self) -> None:
        """Leave gradients to autograd, which makes tensors for them."""

    @property
    def has_some(self) -> bool:
        """Whether a gradient has been added to since the last reduction."""
        return any(self.params.leaves[spec.name].grad is not None for spec in self.specs)

    def grew(self, name: str) -> bool:
        """Count an addition to a gradient; tell whether those of one backward are complete."""
        self.present.add(name)
        if not self._left:
            return False
        self._left[name] -= 1
        # Most additions complete nothing.
        return self._left[name] <= 0 and max(self._left.values()) <= 0

    def flush(self) -> None:
        """Start to reduce what gradients there are; a missing one counts as zeros."""
        self.collect()
        self.is_touched = False
        leaves = self.params.leaves
        first = leaves[self.specs[0].name]
        flat = torch.zeros(self.numel, dtype=first.grad_dtype or first.dtype, device=first.device)
        for spec, start, end in self.places:
            leaf = leaves[spec.name]
            if leaf.grad is not None:
                self.present.add(spec.name)
                flat[start:end].copy_(leaf.grad.reshape(-1))
                leaf.grad = None
            if self.note is not None:
                self.note(spec.name, flat[start:end])
        self.whole_bytes = flat.nbytes
        self._left = dict(self._adds)
        self._running = self._start_sums(self.early, Done(flat))

    def collect(self) -> None:
        """Wait for the last reduction, and add up its result."""
        running, self._running = self._running, None
        if running is not None:
            part = running.wait()
            self._sum = part if self._sum is None else self._sum.add_(part)

    def start(self) -> None:
        """Reduce the remaining gradients."""
        if self.has_some or (self._sum is None and self._running is None):
            self.flush()
        self.collect()
        assert self._sum is not None
        self.pending, self._sum = Done(self._sum), None


def scattered_bytes(buckets: Sequence[ScatteredBucket]) -> int:
    """Return the bytes that buckets held in a step: their ranges, and the most of whole gradients at once."""
    whole: dict[object, int] = {}
    for bucket in buckets:
        # Those of a run of a stage are reduced together.
        together = bucket.stages if bucket.scope == "run" else bucket
        whole[together] = whole.get(together, 0) + bucket.whole_bytes
    return sum(bucket.held_bytes for bucket in buckets) + max(whole.values(), default=0)
