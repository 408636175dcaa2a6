"""Accumulate the gradients of a step over microbatches, sum them once over ranks, and add them to
`parameter.grad`.

In: a rank's leaves, whose `.grad` autograd fills, or calls of `add` by GEMMs that compute weight gradients.
Out: `parameter.grad`, the gradient of the loss of the global batch. A leaf's `.grad` has the dtype
`Placement.sum_dtype`, in which all sums are computed.

Sums run on *buckets*: flat buffers of 8 to 100 MB, grouped by `program/buckets.py`. A bucket has a list of
sums, over dp, then tp, then owners: the backward of each conversion from its parameters' storage to their
use. The sum over dp starts when the last gradient of a bucket is complete, which hooks on the leaves detect
and REDUCE actions guarantee; all replicas hold the same buckets and start them in the same order. Sums over
tp and owners are deferred to `finish`: during backward they would interleave with its collectives over tp,
differently on every tensor rank.

    gradients.begin(); ...; gradients.reduce(stage=2); ...; gradients.finish(); gradients.commit()
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Sequence
from typing import Any

import torch

from autoptd.compat import set_grad_dtype
from autoptd.errors import InternalError
from autoptd.ir.placement import AxisConversion
from autoptd.program.buckets import BucketPlan, plan_buckets
from autoptd.program.program import Program
from autoptd.program.specs import ParamSpec
from autoptd.runtime.ops.linear import WeightTerm
from autoptd.runtime.params.guard import guard_gradient, unguarded
from autoptd.runtime.params.parameters import RankParameters
from autoptd.runtime.params.parts import by_dtype, dtype_of
from autoptd.runtime.world.world import Done, Group, Pending, World

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

    def __init__(self, plan: BucketPlan, params: RankParameters) -> None:
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


class Gradients:
    """The gradients of one rank; `begin`, `reduce`, `finish` and `commit` are called by the executor, in this order."""

    def __init__(self, program: Program, world: World, params: RankParameters) -> None:
        self.params, self.world = params, world
        trained = [spec for spec in program.params if spec.requires_grad and spec.name in params.local]
        here: dict[str, list[int]] = {}
        for spec in trained:
            here[spec.name] = self._stages_here(program, spec)
            set_grad_dtype(params.leaves[spec.name], dtype_of(spec.storage.sum_dtype))
        busy, place = program.busy_axes, world.pipeline_rank
        plans = plan_buckets(program.params, program.orders, program.ranks, world.mesh, place, busy)
        self.buckets = [Bucket(plan, params) for plan in plans if plan.sums]
        self._bucket_of = {spec.name: bucket for bucket in self.buckets for spec in bucket.specs}
        # Parameters whose gradients are not summed over ranks: the leaf's gradient is used directly.
        self._alone = [spec.name for spec in trained if spec.name not in self._bucket_of]
        # Counting costs Python time per parameter and microbatch: only if the sum starts in backward.
        self._counted: dict[str, Bucket] = {}
        for bucket in self.buckets:
            if bucket.early:
                self._counted |= {spec.name: bucket for spec in bucket.specs}
        # Of counted parameters: their stages here, and the number of additions to their gradient in a step.
        self._stages: dict[str, set[int]] = {}
        self._expected: dict[str, int] = {}
        for spec in trained:
            if spec.name in self._counted:
                stages = here[spec.name]
                self._stages[spec.name] = set(stages)
                self._expected[spec.name] = sum(map(spec.adds_in, stages)) * program.num_microbatches
        self._name_of = {id(params.leaves[name]): name for name in self._bucket_of}
        self._results: dict[str, torch.Tensor] = {}
        # Whether a step has succeeded: before that, only some owners may have completed an exchange.
        self._is_agreed = False
        # By parameter. Hooks of uncounted ones serve in the first step only, to find those with a gradient.
        self._hooks: dict[str, Any] = {}
        self.attach()
        # Bytes of the gradient buffers of the last step, and of the copies rounded for the user.
        self.held_bytes = 0
        self.forget()

    def _stages_here(self, program: Program, spec: ParamSpec) -> list[int]:
        return [stage for stage in spec.stages if program.rank_of_stage(stage) == self.world.pipeline_rank]

    def attach(self) -> None:
        """Install hooks that observe additions to the gradients of leaves."""
        for name in self._counted if self._is_agreed else self._bucket_of:
            if name not in self._hooks:
                hook = _growth_hook(weakref.ref(self), name)
                self._hooks[name] = self.params.leaves[name].register_post_accumulate_grad_hook(hook)

    def detach(self, but: Container[str] = ()) -> None:
        """Release the leaves, except those in `but`, to a program for other sizes."""
        for name in [name for name in self._hooks if name not in but]:
            self._hooks.pop(name).remove()

    def begin(self) -> None:
        """Discard the state of the last step, even a failed one, and allocate the sums of a new one."""
        if not self._hooks:
            self.attach()
        self.forget()
        self.held_bytes = 0
        for bucket in self.buckets:
            bucket.begin()
            assert bucket.flat is not None
            self.held_bytes += bucket.flat.nbytes

    def forget(self) -> None:
        """Return to the state before a step."""
        self.drop()
        for bucket in self.buckets:
            bucket.forget()
            if not self._is_agreed:
                bucket.present_anywhere = None
        self._counts = dict.fromkeys(self._expected, 0)
        self._open_stages = {name: set(stages) for name, stages in self._stages.items()}
        self._next = 0

    @torch.no_grad()
    def add(self, gemm: WeightTerm) -> None:
        """Run a GEMM, and add its result to the gradient of its weight, a leaf."""
        leaf = gemm.weight
        leaf.grad = gemm.add_to(leaf.grad, leaf.grad_dtype or leaf.dtype)
        if (name := self._name_of.get(id(leaf))) is not None:
            self.grew(name)

    def grew(self, name: str) -> None:
        """Count an addition to the gradient of leaf `name`; InternalError if it is late or superfluous."""
        bucket = self._bucket_of[name]
        bucket.present.add(name)
        if name not in self._counted:
            return
        # A hot path: called in every backward of every parameter.
        if bucket.pending is not None:
            raise InternalError(f"gradient of {name}", "grew after its reduction had started")
        self._counts[name] = count = self._counts[name] + 1
        if count < self._expected[name]:
            return
        if count > self._expected[name]:
            fact = f"grew in one backward too many: {self._expected[name]} were expected"
            raise InternalError(f"gradient of {name}", fact)
        self._complete(name)

    def reduce(self, stage: int) -> None:
        """Complete the gradients of parameters whose last stage on this rank is `stage`, after its backwards.

        Without it, a parameter that got no gradient in some microbatch would never be complete.
        """
        for name, stages in self._open_stages.items():
            if stage in stages:
                stages.discard(stage)
                if not stages:
                    self._complete(name)

    def finish(self) -> None:
        """Start the remaining sums, then wait for all; call `commit` or `drop` afterwards."""
        for bucket in self.buckets:
            # All backwards are over: a missing gradient counts as zeros.
            bucket.incomplete.clear()
        self._start_complete()
        for bucket in self.buckets:
            bucket.start_late()
        # Sums over owners block: all ranks make them in the order of the program, to avoid deadlocks.
        for bucket in sorted(self.buckets, key=lambda bucket: bucket.number):
            self._results |= bucket.result()

    @unguarded()
    @torch.no_grad()
    def commit(self, loss_scale: float | None = None) -> None:
        """Add the step's gradients to `parameter.grad` (and `parameter.main_grad`), divided by the loss scale."""
        for name in self._alone:
            if (grad := self.params.leaves[name].grad) is not None:
                self._results[name] = grad
                self.held_bytes += grad.nbytes
        if loss_scale is not None:
            for same in by_dtype(self._results.values()):
                torch._foreach_mul_(same, 1 / loss_scale)
        plain = self.params.plain
        for name, grad in self._results.items():
            # A shortcut for the usual case, which occurs for every parameter in a step.
            if (bearer := plain.get(name)) is not None and bearer.grad is None:
                bearer.grad = guard_gradient(grad)
            else:
                self._hand_over(name, grad)
        self.params.hand_gradients()
        self.params.is_update_due = True
        self.held_bytes += self.params.rounded_bytes()
        self._is_agreed = True
        if len(self._hooks) > len(self._counted):
            self.detach(but=self._counted)
        self.drop()

    def _hand_over(self, name: str, grad: torch.Tensor) -> None:
        present = self.params.gradient(name)
        self.params.set_gradient(name, grad if present is None else present.to(grad.dtype).add_(grad))

    def drop(self) -> None:
        """Free the step's gradients."""
        self._results = {}
        for leaf in self.params.leaves.values():
            leaf.grad = None

    def _complete(self, name: str) -> None:
        # Called once per parameter by `grew` or `reduce`, whichever comes first; the other finds it removed.
        incomplete = self._counted[name].incomplete
        if name in incomplete:
            incomplete.discard(name)
            if not incomplete:
                self._start_complete()

    def _start_complete(self) -> None:
        """Start complete buckets in their fixed order: an incomplete one blocks the following."""
        while self._next < len(self.buckets) and not self.buckets[self._next].incomplete:
            self.buckets[self._next].start()
            self._next += 1


def _growth_hook(gradients: weakref.ref[Gradients], name: str) -> Callable[[torch.Tensor], None]:
    # Weak, because the garbage collector does not see cycles through a tensor's hooks.
    def hook(_: torch.Tensor) -> None:
        if (alive := gradients()) is not None:
            alive.grew(name)

    return hook
