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
from collections.abc import Callable, Container
from typing import Any

import torch

from autoptd.compat import set_grad_dtype
from autoptd.errors import InternalError
from autoptd.ir.actions import BACKWARD, Action, Kind
from autoptd.program.buckets import plan_buckets
from autoptd.program.program import Program
from autoptd.program.specs import ParamSpec
from autoptd.runtime.ops.linear import WeightTerm
from autoptd.runtime.params.gradient_buckets import Bucket, ScatteredBucket, scattered_bytes
from autoptd.runtime.params.guard import guard_gradient, unguarded
from autoptd.runtime.params.parameters import RankParameters
from autoptd.runtime.params.parts import by_dtype, dtype_of
from autoptd.runtime.world.world import World


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
        once = [plan for plan in plans if plan.sums and plan.sum_scope == "step"]
        several = [plan for plan in plans if plan.sums and plan.sum_scope != "step"]
        self.buckets = [Bucket(plan, params) for plan in once]
        self.scattered = [ScatteredBucket(plan, params, here[plan.params[0].name]) for plan in several]
        # The one whose reduction was started last, and those that the running action has reduced.
        self._last: ScatteredBucket | None = None
        self._flushed: set[ScatteredBucket] = set()
        self._has_weight_actions = any(kind is Kind.W for kind, _, _, _ in program.orders[place])
        self._bucket_of = {spec.name: bucket for bucket in self.all_buckets for spec in bucket.specs}
        # Parameters whose gradients are not summed over ranks: the leaf's gradient is used directly.
        self._alone = [spec.name for spec in trained if spec.name not in self._bucket_of]
        # Counting costs Python time per parameter and microbatch: only if the sum starts in backward.
        self._counted: dict[str, Bucket] = {}
        for bucket in self.buckets:
            if bucket.early:
                self._counted |= {spec.name: bucket for spec in bucket.specs}
        # Parameters whose hooks stay.
        self._watched = set(self._counted)
        for bucket in self.scattered:
            self._watched.update(spec.name for spec in bucket.specs if bucket.scope == "use")
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

    @property
    def all_buckets(self) -> list[Bucket]:
        return [*self.buckets, *self.scattered]

    def attach(self) -> None:
        """Install hooks that observe additions to the gradients of leaves."""
        for name in self._bucket_of if not self._is_agreed else sorted(self._watched):
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
        self._last = None
        self._flushed.clear()
        for bucket in self.all_buckets:
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
        if isinstance(bucket, ScatteredBucket):
            if bucket.grew(name) and bucket.scope == "use":
                self._flush(bucket)
            return
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

    def left(self, action: Action, following: Action | None) -> None:
        """Reduce the gradients that an F, B or W has left: those of its microbatch, or of its stage where `following`, the next
        of these actions, is of another.
        """
        is_last = action.kind is Kind.W if self._has_weight_actions else action.kind is Kind.B
        for bucket in self.scattered:
            if action.stage not in bucket.stages:
                continue
            if bucket.scope == "run":
                bucket.is_touched |= action.kind in BACKWARD
                is_due = bucket.is_touched and (following is None or following.stage not in bucket.stages)
            else:
                # On all ranks alike, whether there are gradients or not, unless counting has found them complete.
                is_expected = action.kind is Kind.B or not bucket.is_counted
                is_due = is_last and (bucket.has_some or (is_expected and bucket not in self._flushed))
            if is_due:
                self._flush(bucket)
        self._flushed.clear()

    def _flush(self, bucket: ScatteredBucket) -> None:
        # So that only one has whole gradients on their way.
        if self._last is not None:
            self._last.collect()
        bucket.flush()
        self._last = bucket
        self._flushed.add(bucket)

    def finish(self) -> None:
        """Start the remaining sums, then wait for all; call `commit` or `drop` afterwards."""
        for bucket in self.buckets:
            # All backwards are over: a missing gradient counts as zeros.
            bucket.incomplete.clear()
        self._start_complete()
        for scattered in self.scattered:
            scattered.start()
        for bucket in self.all_buckets:
            bucket.start_late()
        # Sums over owners block: all ranks make them in the order of the program, to avoid deadlocks.
        for bucket in sorted(self.all_buckets, key=lambda bucket: bucket.number):
            self._results |= bucket.result()
        self.held_bytes += scattered_bytes(self.scattered)

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
        if len(self._hooks) > len(self._watched):
            self.detach(but=self._watched)
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
