"""Gradients of one step: accumulated over microbatches, summed once over ranks, then added to `parameter.grad`.

In: a rank's leaves, whose `.grad` autograd fills, or `add` where a GEMM brings its weight's gradient itself. Out:
`parameter.grad`, of the loss of the global batch. A leaf's `.grad` has the dtype `Placement.sum_dtype`, in which all
sums are computed.

Sums run on *buckets*: flat buffers of about 100 MB, grouped by `program/buckets.py`. A bucket has a list of sums, over
dp, then tp, then owners: the backward of each conversion from its parameters' storage to their use. The sum over dp
starts when the last gradient of a bucket is complete, which hooks on the leaves notice and REDUCE actions guarantee; all
replicas hold the same buckets and start them in the same order. Sums over tp and owners wait for `finish`: within a
backward they would come between its own calls over tp, at a different place on every tensor rank.

    gradients.begin(); ...; gradients.reduce(stage=2); ...; gradients.finish(); gradients.commit()
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import torch

from autoptd.compat import set_grad_dtype
from autoptd.errors import InternalError, PlanError
from autoptd.ir.layout import copy_axes
from autoptd.ir.placement import AxisConversion
from autoptd.kernels.forms import wide
from autoptd.program.buckets import BUCKET_BYTES, BucketPlan, plan_buckets
from autoptd.program.program import Program
from autoptd.program.specs import ParamSpec
from autoptd.runtime.guard import guard_gradient, unguarded
from autoptd.runtime.linear import WeightTerm
from autoptd.runtime.parameters import RankParameters, dtype_of
from autoptd.runtime.world.world import Done, Group, Pending, World


def _start_all_reduce(group: Group, flat: torch.Tensor, site: str) -> Pending:
    return group.all_reduce_start(flat, site)


# By the backward of a conversion (`ir/placement.py`): how it is started on a flat buffer of gradients. A
# reduce-scatter, as storage that is cut over dp needs it, would be an entry here; `Bucket.result` would then
# split the buffer by the shapes of shards.
START = {"all-reduce": _start_all_reduce}
StartSum = Callable[[torch.Tensor, str], Pending]


def _bound(sums: Sequence[AxisConversion], world: World) -> list[StartSum]:
    """Return the functions that start these sums on this rank's groups."""
    return [partial(START[row.backward], world.group((axis,))) for axis, row in sums]


class Bucket:
    """The gradients of a planned bucket, on one rank. Call `start`, `start_late` and `result`, in this order."""

    def __init__(self, plan: BucketPlan, world: World) -> None:
        self.number, self.specs = plan.number, plan.params
        self.site, self.tied_site = plan.site, plan.tied_site
        self.world, self.owners = world, world.owners(plan.owners)
        self.early, self.late = _bound(plan.early, world), _bound(plan.late, world)
        self.is_tied = bool(plan.tied)
        self.present_anywhere: set[str] | None = None
        self.begin()

    def begin(self) -> None:
        """Forget the step before."""
        # Parameters whose gradient is not complete yet, and those that have one on this rank.
        self.incomplete = {spec.name for spec in self.specs}
        self.present: set[str] = set()
        self.pending: Pending | None = None

    def start(self, leaves: dict[str, torch.Tensor]) -> None:
        """Start the sum over the early axes, moving the gradients out of the leaves; a missing one counts as zeros."""
        mine = [leaves[spec.name] for spec in self.specs]
        self.present = {spec.name for spec in self.specs if leaves[spec.name].grad is not None}
        grads = [_gradient(leaf).reshape(-1) for leaf in mine]
        flat = torch.cat(grads) if len(grads) > 1 else grads[0]
        # `flat` has them all: keeping the leaves' gradients as well would take the memory twice.
        for leaf in mine:
            leaf.grad = None
        self.pending = self._start_sums(self.early, Done(flat))

    def start_late(self) -> None:
        """Wait for the sum over the early axes and start the others, after the last action."""
        assert self.pending is not None
        self.pending = self._start_sums(self.late, self.pending)

    def _start_sums(self, sums: Sequence[StartSum], pending: Pending) -> Pending:
        """Chain the sums: each waits for the one before it, and the last one is left running."""
        for start in sums:
            pending = start(pending.wait(), self.site)
        return pending

    def result(self, leaves: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Wait; return the summed gradients by name, without those that no rank has. Blocks for the sum over owners."""
        assert self.pending is not None
        flat = self.pending.wait()
        if self.is_tied:
            flat = self.owners.all_reduce(flat, self.tied_site)
        exists = self._present_on_owners() if self.is_tied else self.present
        shapes = [leaves[spec.name].shape for spec in self.specs]
        # Views of the buffer, which lives as long as one of these gradients does.
        pieces = flat.split(list(map(math.prod, shapes)))
        named = zip(self.specs, shapes, pieces, strict=True)
        return {spec.name: x.view(shape) for spec, shape, x in named if spec.name in exists}

    def _present_on_owners(self) -> set[str]:
        """Return the parameters whose gradient some owner has: the same in every step, so it is exchanged once."""
        if self.present_anywhere is None:
            everywhere = self.owners.gather_objects(self.present, f"{self.tied_site}: which exist")
            self.present_anywhere = set().union(*everywhere)
        return self.present_anywhere


class Gradients:
    """The gradients of one rank; `begin`, `reduce`, `finish` and `commit` are called by the executor, in this order."""

    def __init__(
        self, program: Program, world: World, params: RankParameters, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        self.params, self.world = params, world
        trained = [spec for spec in program.params if spec.requires_grad and spec.name in params.local]
        here: dict[str, list[int]] = {}
        for spec in trained:
            here[spec.name] = self._stages_here(program, spec)
            set_grad_dtype(params.leaves[spec.name], dtype_of(spec.storage.sum_dtype))
        plans = plan_buckets(
            program.params, program.orders, program.ranks, world.mesh, world.pipeline_rank, bucket_bytes
        )
        self.buckets = [Bucket(plan, world) for plan in plans if plan.sums]
        self._bucket_of = {spec.name: bucket for bucket in self.buckets for spec in bucket.specs}
        # Parameters whose gradients no other rank has a part of, with all that `commit` asks of them in every step.
        self._alone: list[tuple[str, torch.Tensor, torch.nn.Parameter, bool]] = []
        for name in here:
            if name not in self._bucket_of:
                leaf, parameter = params.leaves[name], params.local[name]
                self._alone.append((name, leaf, parameter, params.is_plain(name)))
        # Counting gradients costs Python time per parameter and microbatch: only where the sum starts during backward.
        self._counted: dict[str, Bucket] = {}
        for bucket in self.buckets:
            if bucket.early:
                self._counted |= {spec.name: bucket for spec in bucket.specs}
        # Of counted parameters: their stages here, and how often their gradient grows in one step.
        self._stages: dict[str, set[int]] = {}
        self._expected: dict[str, int] = {}
        for spec in trained:
            if spec.name in self._counted:
                stages = here[spec.name]
                self._stages[spec.name] = set(stages)
                self._expected[spec.name] = sum(map(spec.adds_in, stages)) * program.num_microbatches
        self._name_of = {id(params.leaves[name]): name for name in self._counted}
        self._results: dict[str, torch.Tensor] = {}
        # Whether a step ended well: until then, an aborted exchange between owners may be known to some of them only.
        self._is_agreed = False
        for name in self._counted:
            params.leaves[name].register_post_accumulate_grad_hook(_counting_hook(weakref.ref(self), name))
        self.begin()

    def _stages_here(self, program: Program, spec: ParamSpec) -> list[int]:
        return [stage for stage in spec.stages if program.rank_of_stage(stage) == self.world.pipeline_rank]

    def begin(self) -> None:
        """Forget what an earlier, perhaps failed, step left."""
        self.drop()
        for bucket in self.buckets:
            bucket.begin()
            if not self._is_agreed:
                bucket.present_anywhere = None
        self._counts = dict.fromkeys(self._expected, 0)
        self._open_stages = {name: set(stages) for name, stages in self._stages.items()}
        self._next = 0

    @torch.no_grad()
    def add(self, gemm: WeightTerm) -> None:
        """Run a GEMM, and add its result to the gradient of its weight, which is a leaf."""
        leaf = gemm.weight
        leaf.grad = gemm.add_to(leaf.grad, leaf.grad_dtype or leaf.dtype)
        if (name := self._name_of.get(id(leaf))) is not None:
            self.count(name)

    def count(self, name: str) -> None:
        """Count one more addition to the gradient of leaf `name`; InternalError where it comes too late or too often."""
        if self._counted[name].pending is not None:
            raise InternalError(f"gradient of {name}", "grew after its reduction had started")
        self._counts[name] += 1
        if self._counts[name] > self._expected[name]:
            raise InternalError(
                f"gradient of {name}", f"a backward too many: {self._expected[name]} were expected"
            )
        if self._counts[name] == self._expected[name]:
            self._complete(name)

    def reduce(self, stage: int) -> None:
        """Complete the gradients of parameters that no later stage of this rank uses: the backwards of `stage` are over.

        Without it, a parameter that got no gradient in some microbatch would never be complete.
        """
        for name, stages in self._open_stages.items():
            if stage in stages:
                stages.discard(stage)
                if not stages:
                    self._complete(name)

    def finish(self) -> None:
        """Start what has not started, then wait for everything; `commit` or `drop` follows."""
        for bucket in self.buckets:
            # All backwards are over: a gradient that is missing now stays missing, and counts as zeros.
            bucket.incomplete.clear()
        self._start_complete()
        for bucket in self.buckets:
            bucket.start_late()
        # Sums over owners block: all ranks make them in the order of the program, so that no two wait for each other.
        for bucket in sorted(self.buckets, key=lambda bucket: bucket.number):
            self._results |= bucket.result(self.params.leaves)

    @unguarded()
    @torch.no_grad()
    def commit(self) -> None:
        """Add the step's gradients to `parameter.grad` (and `parameter.main_grad`)."""
        for name, leaf, parameter, is_plain in self._alone:
            if (grad := leaf.grad) is None:
                continue
            # The common case at d=1, without a sum or a copy: the leaf's gradient becomes the parameter's.
            if is_plain and parameter.grad is None:
                parameter.grad = guard_gradient(grad)
            else:
                self._hand_over(name, grad)
        for name, grad in self._results.items():
            self._hand_over(name, grad)
        self._is_agreed = True
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
        # Called once per parameter by `count` or `reduce`, whichever comes first; the other finds it removed.
        incomplete = self._counted[name].incomplete
        if name in incomplete:
            incomplete.discard(name)
            if not incomplete:
                self._start_complete()

    def _start_complete(self) -> None:
        """Start complete buckets, in their fixed order: one that is not complete holds up those behind it."""
        while self._next < len(self.buckets) and not self.buckets[self._next].incomplete:
            self.buckets[self._next].start(self.params.leaves)
            self._next += 1


@unguarded()
def grad_norm(params: RankParameters) -> torch.Tensor:
    """Return the 2-norm of all gradients of the model, every parameter counted once, on every rank (float64, 0-d).

    Over an axis where a parameter is S every rank counts its shard, over others the first rank counts it; a tied
    parameter is counted by its first owner. Replicas hold equal gradients, and are not summed over.
    """
    world = params.world
    counted: list[torch.Tensor] = []
    for spec in params.specs:
        counts = params.is_first_owner(spec) and is_first_holder(spec, world)
        gradient = params.gradient(spec.name) if counts else None
        if gradient is not None:
            counted.append(gradient)
    total = _sum_of_squares(counted, world.device)
    # Every gradient was counted once within a replica: the sum is over its ranks.
    for axis in world.mesh.axes:
        if axis not in world.mesh.batch_axes:
            total = world.group((axis,)).all_reduce(total, "gradient norm")
    return total.sqrt()


def is_first_holder(spec: ParamSpec, world: World) -> bool:
    """Tell whether this rank is the first of those with its part of a parameter, along the axes that cut values."""
    return all(world.group((axis,)).index == 0 for axis in copy_axes(spec.storage.layout, world.mesh))


@unguarded()
@torch.no_grad()
def clip_gradients(params: RankParameters, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """Scale all gradients so that their global norm is at most `max_norm`; return the norm before.

    The factor is that of `torch.nn.utils.clip_grad_norm_`: min(1, max_norm / (norm + 1e-6)).
    """
    if norm_type != 2:
        raise PlanError(f"norm_type={norm_type}", "only the 2-norm is there", "norm_type=2")
    norm = grad_norm(params)
    # On the device: comparing on the host would make it wait.
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    gradients: dict[str, torch.Tensor] = {}
    for name in params.local:
        if (gradient := params.gradient(name)) is not None:
            gradients[name] = gradient
    for same in _by_dtype(gradients.values()):
        torch._foreach_mul_(same, factor.to(same[0].dtype))
    for name, gradient in gradients.items():
        # `parameter.grad` is a rounded copy there.
        if not params.is_plain(name):
            params.set_gradient(name, gradient)
    return norm


def _sum_of_squares(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the sum of the squares of all entries, in float64."""
    norms: list[torch.Tensor] = []
    for same in _by_dtype(torch.view_as_real(x) if x.is_complex() else x for x in tensors):
        # CUDA's sums are trees, exact enough in float32; float64 would write a copy of every tensor first.
        dtype = wide(same[0].dtype) if device.type == "cuda" else torch.float64
        norms += torch._foreach_norm(same, 2, dtype)
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack([norm.double() for norm in norms]).square().sum()


def _by_dtype(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield lists of tensors of one dtype: torch's operators on mixed lists fall back to one tensor after the other."""
    lists: dict[torch.dtype, list[torch.Tensor]] = {}
    for x in tensors:
        lists.setdefault(x.dtype, []).append(x)
    yield from lists.values()


def _counting_hook(gradients: weakref.ref[Gradients], name: str) -> Callable[[torch.Tensor], None]:
    # Weak: the garbage collector does not see cycles through a tensor's hooks.
    def hook(_: torch.Tensor) -> None:
        if (alive := gradients()) is not None:
            alive.count(name)

    return hook


def _gradient(leaf: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(leaf, dtype=leaf.grad_dtype) if leaf.grad is None else leaf.grad
