"""Hold a rank's parameters, and convert between shards and the full tensors of the user's model.

In: a program's `ParamSpec`s and full tensors by name. Out: on each rank one `nn.Parameter`, the local shard, for every
parameter that a stage of its pipeline rank uses; these stages share it. An *owner* of a parameter is a pipeline rank
with such a stage.

    params = RankParameters(program, world, dict(model.named_parameters()))
    params.local["lm_head.weight"]           # the user's view: same ndim, the rows of this tensor rank
    params.stored["lm_head.weight"]          # stepped by the optimizer: the same, or this rank's stored piece

Stages compute with *leaves*: detached tensors that share the parameter's storage, so that a step's gradients accumulate
in `leaf.grad` and reach `parameter.grad` only when they are complete and the loss is not NaN.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from autoptd.compat import set_grad_dtype
from autoptd.errors import PlanError
from autoptd.program.buckets import BucketPlan, plan_buckets, units_of
from autoptd.program.gathers import Unit
from autoptd.program.program import Program
from autoptd.program.sources import Source
from autoptd.program.specs import ParamSpec
from autoptd.runtime.params.guard import GuardedParameter, guard_gradient, unguarded
from autoptd.runtime.params.namespace import Namespace
from autoptd.runtime.params.parts import dtype_of, from_rank_0, read_shard, shard_of
from autoptd.runtime.params.storage import Edits, SharedBucket, alias, check_use, is_first_holder
from autoptd.runtime.params.units import Units
from autoptd.runtime.world.world import World

# Initial values of parameters: full tensors by name, or a source of them.
Values = Mapping[str, torch.Tensor] | Source


def owners(program: Program, spec: ParamSpec) -> tuple[int, ...]:
    """Return the pipeline ranks that hold a copy of the parameter, ascending."""
    return spec.owners(program.ranks)


@dataclass(frozen=True)
class MainGrad:
    """A gradient in `Placement.sum_dtype`, and its copy in the parameter's dtype, which is `parameter.grad`.

    `version` is that of the copy: if the user has changed it since, the copy is the gradient.
    """

    main: torch.Tensor
    copy: torch.Tensor
    version: int


class RankParameters:
    """The parameters of one rank. Creating it is a collective: rank 0's values are broadcast, as in DDP.

    From a `Source` every rank reads its part instead, so that no rank holds a whole tensor. `specs` covers
    the whole program; `local` and `leaves` hold this rank's tensors by the first name of the parameter.
    """

    @unguarded()
    def __init__(self, program: Program, world: World, full: Values) -> None:
        self.program, self.world = program, world
        self.specs = program.params
        self.local: dict[str, GuardedParameter] = {}
        self.leaves: dict[str, torch.Tensor] = {}
        self._main: dict[str, MainGrad] = {}
        # The dtype of `.main_grad`; a master's gradient already has the dtype of its sum.
        self._grad_dtypes: dict[str, torch.dtype | None] = {}
        for spec in self.specs:
            has_main = spec.storage.grad_dtype and not spec.has_master
            self._grad_dtypes[spec.name] = dtype_of(spec.storage.grad_dtype) if has_main else None
        # Buckets that replicas share, in the order in which forward uses them.
        self.shared: list[SharedBucket] = []
        self._shared_of: dict[str, SharedBucket] = {}
        # Tensors that an optimizer steps: the parameter itself, or the piece of it that this rank stores.
        self.stored: dict[str, GuardedParameter] = {}
        for spec in self.specs:
            check_use(spec)
        parts = {spec.name: shard for spec, shard in self._first_values(full)}
        for plan in reversed(self._plans()):
            if plan.parts(world.mesh) > 1:
                self._share(plan, parts)
        # Those that are gathered for their uses.
        apart: dict[Unit, list[SharedBucket]] = {}
        for unit in units_of(bucket.plan for bucket in self.shared):
            apart[unit] = [
                bucket for bucket in self.shared if bucket.plan.unit == unit and bucket.plan.is_apart
            ]
        self.units = Units(apart) if apart else None
        # Tensors that stages use of other parameters with separate storage.
        self._copies: dict[str, torch.Tensor] = {}
        for spec in self.specs:
            if spec.name in parts:
                self._add(spec, parts.pop(spec.name))
        # The gradients assigned to their storage: any other gradient there was set by the user.
        self._handed: dict[str, torch.Tensor | None] = {}
        # Tensors whose `.grad` the user sees and may change: the parameter, or a piece of shared storage.
        self._bearers: dict[str, GuardedParameter] = {}
        for name in self.local:
            bearer = self.stored.get(name) if name in self._shared_of else self.local[name]
            if bearer is not None:
                self._bearers[name] = bearer
        # Parameters without `.main_grad`, whose `.grad` is the gradient itself.
        self.plain = {name: x for name, x in self._bearers.items() if self._grad_dtypes[name] is None}
        # Edits of the tensors that stages use, to be copied to storage.
        self._with_masters = [spec for spec in self.specs if spec.has_master and spec.name in self.local]
        self._versions = {spec.name: self.local[spec.name]._version for spec in self._with_masters}
        # Edits of storage, to be published to the tensors that stages use.
        self.edits = Edits({name: self.stored[name] for name in self.stored if self._is_stored_apart(name)})
        # Whether a step has added gradients since the last update or `zero_grad`.
        self.is_update_due = False
        # Whether an optimizer was created, which exposes storage to the user.
        self.is_lent = False
        # The expected storage for `check_storage`, which runs in every step: of used and of stepped tensors.
        self._initial = [
            (name, parameter, _address(parameter), parameter.requires_grad)
            for name, parameter in [*self.local.items(), *self.edits.stored.items()]
        ]

    def _first_values(self, full: Values) -> Iterator[tuple[ParamSpec, torch.Tensor]]:
        """Yield this rank's part of every parameter that it owns, contiguous."""
        if not isinstance(full, Mapping):
            reader = full.reader()
            for spec in self.specs:
                if self.is_owner(spec):
                    yield spec, read_shard(spec, reader, self.world).contiguous()
            return
        for spec in self.specs:
            # A collective: every rank takes part, including those that do not own the parameter.
            whole = from_rank_0(self.world, spec.name, full[spec.name], dtype_of(spec.storage.dtype))
            if self.is_owner(spec):
                own = shard_of(spec, whole, self.world)
                # A copy, because on rank 0 `whole` may be the user's own storage.
                yield spec, own.clone(memory_format=torch.contiguous_format)

    def _plans(self) -> list[BucketPlan]:
        program = self.program
        rank = self.world.pipeline_rank
        return plan_buckets(program.params, program.orders, program.ranks, self.world.mesh, rank)

    def _share(self, plan: BucketPlan, parts: dict[str, torch.Tensor]) -> None:
        """Move the parameters of a bucket into a flat buffer; this rank stores a range of it."""
        bucket = SharedBucket(plan, self.world, parts)
        self.shared.append(bucket)
        for place in bucket.places:
            name = place.spec.name
            self._shared_of[name] = bucket
            parts[name] = bucket.local(place, parts[name].shape)
            if name in bucket.pieces:
                self.stored[name] = bucket.pieces[name].tensor
        if plan.is_apart:
            bucket.empty()

    def _add(self, spec: ParamSpec, part: torch.Tensor) -> None:
        """Create the tensors of a parameter; `part` is the used one if it is shared, else the stored one."""
        used = part
        is_shared = spec.name in self._shared_of
        if spec.has_master and not is_shared:
            used = part.to(dtype_of(spec.use.dtype), copy=True)
            self._copies[spec.name] = alias(used)
            self.stored[spec.name] = GuardedParameter(part, spec.requires_grad)
        local = GuardedParameter(used, requires_grad=spec.requires_grad)
        if spec.has_master and spec.requires_grad:
            set_grad_dtype(local, dtype_of(spec.storage.sum_dtype))
        self.local[spec.name] = local
        # Shares the parameter's memory, so that stages see in-place updates.
        self.leaves[spec.name] = local.detach().requires_grad_(spec.requires_grad)
        if is_shared:
            local.arrival, local.bears_gradient = self._shared_of[spec.name].wait, False
            local.is_absent = spec.is_apart
        elif not spec.has_master:
            self.stored[spec.name] = local

    @property
    def is_apart(self) -> bool:
        """Tell whether any parameter has separate storage, so that updates have to be published."""
        return bool(self.shared or self._copies)

    @torch.no_grad()
    def publish(self) -> None:
        """Publish updated parameters to all ranks that use them; a collective of those that share storage.

        The gathers are only started: call `wait` afterwards.
        """
        if self._copies:
            stored = [self.stored[name].detach() for name in self._copies]
            torch._foreach_copy_(list(self._copies.values()), stored)
        for bucket in self.shared:
            if not bucket.plan.is_apart:
                bucket.gather_start()
        self.edits.note()

    def publish_edits(self) -> None:
        """Publish the user's edits of storage since the last update; a collective like `publish`."""
        self.wait()
        self.absorb_edits()
        self.publish()

    def _is_stored_apart(self, name: str) -> bool:
        return name in self._copies or name in self._shared_of

    @unguarded()
    @torch.no_grad()
    def absorb_edits(self) -> None:
        """Copy the user's edits of parameters to their storage; unedited entries keep all their bits.

        All ranks that hold copies must have made the same edits.
        """
        edited = [spec for spec in self._with_masters if self._is_touched(spec.name)]
        # The storage of these is newer than the used tensors.
        written = frozenset(self.edits.found() if edited else ())
        for spec in edited:
            local = self.local[spec.name]
            if spec.name in written and local._version != self._versions[spec.name]:
                fact = "was changed both through pm.parameters() and through optimizer.param_groups"
                raise PlanError(spec.name, fact, "change it in one of the two places")
            if spec.name in written:
                continue
            self.wait()
            self._versions[spec.name] = local._version
            stored = self.stored.get(spec.name)
            used = self.piece_of(spec.name, local.detach())
            if stored is not None and used is not None:
                stored.copy_(torch.where(used == stored.to(used.dtype), stored, used.to(stored.dtype)))
                self.edits.note([spec.name])

    def _is_touched(self, name: str) -> bool:
        """Tell whether the user may have edited the used tensor of a parameter with a master."""
        local = self.local[name]
        # A holder of its `.data` may write to it at any time, so such a parameter is always compared.
        return local._version != self._versions[name] or local.was_exposed

    @torch.no_grad()
    def load(self, spec: ParamSpec, part: torch.Tensor) -> None:
        """Set a parameter from `part`, this rank's part: the tensor that stages use and the stored one."""
        local = self.local[spec.name]
        if not spec.is_apart:
            local.copy_(part)
        stored = self.stored.get(spec.name)
        if (spec.has_master or spec.is_apart) and stored is not None:
            own = self.piece_of(spec.name, part.to(stored.device))
            assert own is not None
            stored.copy_(own)
        if spec.has_master:
            self._versions[spec.name] = local._version
        self.edits.note([spec.name])

    def wait(self) -> None:
        """Wait until stages can use the last update."""
        for bucket in self.shared:
            bucket.wait()

    def is_shared(self, name: str) -> bool:
        """Tell whether replicas share the storage of a parameter of this rank."""
        return name in self._shared_of

    def pieces_of(self, name: str, range_: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return by name the pieces of `range_`, laid out like this rank's range of the bucket of `name`."""
        return self._shared_of[name].split(range_)

    def piece_of(self, name: str, local: torch.Tensor) -> torch.Tensor | None:
        """Return the stored piece of a tensor laid out like this rank's part of a parameter, or None."""
        bucket = self._shared_of.get(name)
        if bucket is None:
            return local
        piece = bucket.pieces.get(name)
        return None if piece is None else piece.of(local)

    def local_of(self, name: str, stored: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
        """Return this rank's part of a parameter, or of a tensor laid out like it, from the stored pieces.

        A collective of the ranks that share its storage.
        """
        bucket = self._shared_of.get(name)
        if bucket is None:
            return stored
        return bucket.whole(name, stored, dtype).view(self.local[name].shape)

    def is_owner(self, spec: ParamSpec) -> bool:
        return self.world.pipeline_rank in owners(self.program, spec)

    def is_first_owner(self, spec: ParamSpec) -> bool:
        """Tell whether this rank's pipeline rank is the first of those that hold copies."""
        return self.world.pipeline_rank == owners(self.program, spec)[0]

    def weights_of_stage(self, stage: int) -> dict[str, torch.Tensor]:
        """Return the leaves of the parameters that `stage` uses, under all their names."""
        weights: dict[str, torch.Tensor] = {}
        for spec in self.specs:
            if stage in spec.stages:
                weights |= dict.fromkeys((spec.name, *spec.aliases), self.leaves[spec.name])
        return weights

    def wait_where_read(self, stage: int, weights: Namespace) -> None:
        """Make `stage` wait for a gather when it reads the gathered `weights`, instead of before it runs."""
        for spec in self.specs:
            if stage in spec.stages and spec.name in self._shared_of:
                for name in spec.aliases:
                    self._shared_of[spec.name].read.add(weights, name)

    def gradient(self, name: str) -> torch.Tensor | None:
        """Return the gradient of this rank's stored part of a parameter, or None: `main_grad`, unless `.grad`
        was changed; a gradient that was set on separate storage comes first.
        """
        if name in self._copies and (set_apart := self.stored[name].grad) is not self._handed.get(name):
            return set_apart
        parameter = self._bearers.get(name)
        if parameter is None or (grad := parameter.grad) is None:
            return None
        known = self._main.get(name)
        if known is not None and grad is known.copy and grad._version == known.version:
            return known.main
        return grad

    def hand_gradients(self) -> None:
        """Assign the gradients of parameters to their separate storage: after a step, and before an update.

        A gradient that was set on the storage since, where an optimizer exposes it, is kept.
        """
        for name in self._copies:
            stored, local = self.stored[name], self.local[name]
            if stored.grad is self._handed.get(name):
                stored.grad = self._handed[name] = local.grad

    @cached_property
    def counted(self) -> frozenset[str]:
        """Return the parameters counted on this rank, so that over all ranks each entry is counted once."""
        own = [spec for spec in self.specs if self.is_first_owner(spec)]
        return frozenset(spec.name for spec in own if is_first_holder(spec, self.world))

    def zero_gradients(self, names: Iterable[str], set_to_none: bool) -> None:
        """Clear the gradients visible to the user, of parameters with separate storage as well."""
        for name in names:
            if name in self._copies:
                self.stored[name].grad = self._handed[name] = None
            bearer = self._bearers.get(name)
            if bearer is None or bearer.grad is None:
                continue
            if set_to_none:
                bearer.grad = None
            else:
                bearer.grad.zero_()

    @property
    def has_unused_gradients(self) -> bool:
        """Tell whether there are gradients that no update has used."""
        with unguarded():
            return self.is_update_due and any(x.grad is not None for x in self._bearers.values())

    def rounded_bytes(self) -> int:
        """Return the bytes of gradients kept in addition to `main_grad`, rounded to the parameters' dtype."""
        return sum(grad.copy.nbytes for grad in self._main.values())

    def set_gradient(self, name: str, grad: torch.Tensor) -> None:
        """Set the gradient of a parameter: `.main_grad` if it has one, with a rounded copy in `.grad`, else
        `.grad`.
        """
        parameter, dtype = self._bearers[name], self._grad_dtypes[name]
        if dtype is None:
            parameter.grad = guard_gradient(grad)
            if name in self._copies:
                self.stored[name].grad = self._handed[name] = parameter.grad
            return
        main = guard_gradient(grad.to(dtype))
        parameter.main_grad = main  # type: ignore[attr-defined]
        parameter.grad = guard_gradient(main.to(parameter.dtype))
        if parameter.grad is not main:
            self._main[name] = MainGrad(main, parameter.grad, parameter.grad._version)

    @unguarded()
    def check_storage(self) -> None:
        """Raise PlanError if a parameter's storage or `requires_grad` was replaced, unseen by stages."""
        for name, parameter, address, requires_grad in self._initial:
            if _address(parameter) != address:
                raise PlanError(
                    name, "its .data was replaced", "change values in place: parameter.data.copy_(...)"
                )
            if parameter.requires_grad != requires_grad:
                fact = "its requires_grad was changed, which the compiled program does not follow"
                remedy = "pm.save(folder, optimizer), set requires_grad on the model, parallelize it again, "
                remedy += "and pm.load(folder, optimizer) with a new optimizer"
                raise PlanError(name, fact, remedy)


def _address(parameter: torch.Tensor) -> int:
    # Memory that exists only while stages use it may be elsewhere each time.
    return 0 if getattr(parameter, "is_absent", False) else parameter.data_ptr()
