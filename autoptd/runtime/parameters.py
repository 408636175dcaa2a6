"""A rank's parameters, and the conversion between shards and the full tensors of the user's model.

In: a program's `ParamSpec`s and full tensors by name. Out: on each rank one `nn.Parameter`, the local shard, for every
parameter that a stage of its pipeline rank uses; these stages share it. An *owner* of a parameter is a pipeline rank
with such a stage.

    params = RankParameters(program, world, dict(model.named_parameters()))
    params.local["lm_head.weight"]           # what the optimizer steps: ndim kept, the rows of this tensor rank
    full = gather_full(params, spec, params.local.get(spec.name))       # on rank 0; a collective

Stages compute with *leaves*: detached tensors that share the parameter's storage, so that a step's gradients accumulate
in `leaf.grad` and reach `parameter.grad` only when they are complete and the loss is not NaN.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autoptd.errors import InternalError, PlanError
from autoptd.program.program import Program
from autoptd.program.specs import ParamSpec
from autoptd.runtime.guard import GuardedParameter, guard_gradient, unguarded
from autoptd.runtime.read_folder import Folder, Reader
from autoptd.runtime.shards import join_shards, take_shard
from autoptd.runtime.world.world import Group, World

# Initial values of parameters: full tensors by name, or a folder that has them.
Values = Mapping[str, torch.Tensor] | Folder


def dtype_of(name: str) -> torch.dtype:
    """Return `torch.float32` for "float32"."""
    return getattr(torch, name.removeprefix("torch."))  # type: ignore[no-any-return]


def check_use(spec: ParamSpec) -> None:
    """Raise InternalError unless stages can use the storage of a parameter as it is: leaves are views of it."""
    work = [f"{step.row.forward} over {step.axis}" for step in spec.conversions if step.row.forward != "none"]
    if work or spec.use.dtype != spec.storage.dtype or spec.scope != "step":
        what = ", ".join([*work, f"{spec.storage.dtype} to {spec.use.dtype} once a {spec.scope}"])
        raise InternalError(spec.name, f"stages cannot use what is stored as it is: {what}")


def owners(program: Program, spec: ParamSpec) -> tuple[int, ...]:
    """Return the pipeline ranks that hold a copy of the parameter, ascending."""
    return spec.owners(program.ranks)


@dataclass(frozen=True)
class MainGrad:
    """A gradient in `Placement.sum_dtype`, and its copy in the parameter's dtype, which is `parameter.grad`.

    `version` is the copy's: if it was changed since, by the user, the copy is the gradient.
    """

    main: torch.Tensor
    copy: torch.Tensor
    version: int


class RankParameters:
    """The parameters of one rank. Creating it is a collective: rank 0's values are broadcast, as by DDP.

    From a `Folder` every rank reads its own part instead, so that no rank holds a whole tensor. `specs` are those of the
    whole program, `local` and `leaves` hold this rank's by the parameter's (first) name.
    """

    def __init__(self, program: Program, world: World, full: Values) -> None:
        self.program, self.world = program, world
        self.specs = program.params
        self.local: dict[str, nn.Parameter] = {}
        self.leaves: dict[str, torch.Tensor] = {}
        self._main: dict[str, MainGrad] = {}
        grad_dtypes = {spec.name: spec.storage.grad_dtype for spec in self.specs}
        self._grad_dtypes = {name: dtype_of(dtype) if dtype else None for name, dtype in grad_dtypes.items()}
        for spec in self.specs:
            check_use(spec)
        for spec, shard in self._first_values(full):
            self.local[spec.name] = GuardedParameter(shard, requires_grad=spec.requires_grad)
            # Shares the parameter's storage: stages read what the optimizer updates in place.
            self.leaves[spec.name] = self.local[spec.name].detach().requires_grad_(spec.requires_grad)
        # What `check_storage` compares with, which runs in every step.
        self._initial = [
            (name, parameter, parameter.data_ptr(), self.leaves[name].requires_grad)
            for name, parameter in self.local.items()
        ]

    def _first_values(self, full: Values) -> Iterator[tuple[ParamSpec, torch.Tensor]]:
        """Yield this rank's part of every parameter that it owns, contiguous."""
        if isinstance(full, Folder):
            reader = full.reader()
            for spec in self.specs:
                if self.is_owner(spec):
                    yield spec, read_shard(spec, reader, self.world).contiguous()
            return
        for spec in self.specs:
            # A collective: every rank takes part, also those that do not own the parameter.
            whole = from_rank_0(self.world, spec.name, full[spec.name], dtype_of(spec.storage.dtype))
            if self.is_owner(spec):
                own = shard_of(spec, whole, self.world)
                # A copy, because on rank 0 `whole` may be the user's own storage.
                yield spec, own.clone(memory_format=torch.contiguous_format)

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

    def gradient(self, name: str) -> torch.Tensor | None:
        """Return the gradient of a parameter of this rank, None without one: `main_grad`, unless `.grad` was changed."""
        parameter = self.local.get(name)
        if parameter is None or (grad := parameter.grad) is None:
            return None
        known = self._main.get(name)
        if known is not None and grad is known.copy and grad._version == known.version:
            return known.main
        return grad

    def is_plain(self, name: str) -> bool:
        """Tell whether `.grad` is the gradient of a parameter itself: it has no `.main_grad`."""
        return self._grad_dtypes[name] is None

    def set_gradient(self, name: str, grad: torch.Tensor) -> None:
        """Set the gradient of a parameter: `.main_grad` if it has one, of which `.grad` is a rounded copy, else `.grad`."""
        parameter, dtype = self.local[name], self._grad_dtypes[name]
        if dtype is None:
            parameter.grad = guard_gradient(grad)
            return
        main = guard_gradient(grad.to(dtype))
        parameter.main_grad = main  # type: ignore[attr-defined]
        parameter.grad = guard_gradient(main.to(parameter.dtype))
        if parameter.grad is not main:
            self._main[name] = MainGrad(main, parameter.grad, parameter.grad._version)

    @unguarded()
    def check_storage(self) -> None:
        """Raise PlanError where the storage or `requires_grad` of a parameter was replaced: stages use the old ones."""
        for name, parameter, address, requires_grad in self._initial:
            if parameter.data_ptr() != address:
                raise PlanError(
                    name, "its .data was replaced", "change values in place: parameter.data.copy_(...)"
                )
            if parameter.requires_grad != requires_grad:
                fact = "its requires_grad was changed, which the compiled program does not follow"
                raise PlanError(name, fact, "set requires_grad on the model before parallelize")


def from_rank_0(world: World, name: str, x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return rank 0's `x` on this rank's device; a collective."""
    if x.is_meta:
        raise PlanError(
            name, "is on the meta device and has no values", "model.to_empty(...) and initialise it"
        )
    if world.rank == 0:
        own = x.detach().to(world.device, dtype)
    else:
        # The receive buffer: this rank's own values of `x` are not used.
        own = torch.empty(x.shape, dtype=dtype or x.dtype, device=world.device)
    return world.everyone().broadcast(own, f"start: {name}")


def read_shard(spec: ParamSpec, reader: Reader, world: World) -> torch.Tensor:
    """Read this rank's part of a parameter, in the parameter's dtype; PlanError where tied names have different values."""
    names = [name for name in spec.aliases if reader.has(name)]
    if spec.shard:
        # Entries are numbered from 1: `own_entries` gives 0 for padding, which the reader fills with zeros.
        numbers = torch.arange(1, spec.shape[spec.cut_dim] + 1)
        rows = own_entries(spec, numbers, 0, world)
        parts = [reader.rows(name, spec.cut_dim, rows) for name in names]
    else:
        parts = [reader.whole(name) for name in names]
    parts = [part.to(dtype_of(spec.storage.dtype)) for part in parts]
    for name, part in zip(names[1:], parts[1:], strict=True):
        if not torch.equal(part, parts[0]):
            fact = f"is tied to {names[0]} in the model, and has other values than it in the files"
            raise PlanError(
                name, fact, "build the model untied (tie_word_embeddings=False), or correct the files"
            )
    return parts[0].to(world.device)


def shard_of(spec: ParamSpec, full: torch.Tensor, world: World) -> torch.Tensor:
    """Return this rank's part of a full tensor that is laid out as the parameter; may share its storage."""
    return own_entries(spec, full, spec.cut_dim, world) if spec.shard else full


def own_entries(spec: ParamSpec, x: torch.Tensor, dim: int, world: World) -> torch.Tensor:
    """Return this rank's part of `x`, whose `dim` is cut like the sharded dim of the parameter; zeros for padding."""
    return take_shard(x, dim, spec.outer, *own_piece(spec, world), spec.padded_size(world.mesh))


def own_piece(spec: ParamSpec, world: World) -> tuple[int, int]:
    """Return (index, count) of this rank's piece of a parameter that is cut."""
    group = shard_group(spec, world)
    return group.index, group.size


def shard_group(spec: ParamSpec, world: World) -> Group:
    """Return the group of ranks that own the pieces of a parameter that is cut, in their order."""
    axis = spec.shard_axis(world.mesh)
    assert axis is not None, f"{spec.name} is whole"
    return world.group((axis,))


def gather_full(
    params: RankParameters, spec: ParamSpec, local: torch.Tensor | None, dtype: torch.dtype | None = None
) -> torch.Tensor | None:
    """Return the full CPU tensor of which `local` is this rank's part, on rank 0; None elsewhere.

    A collective of all ranks: owners pass their part (laid out as the parameter), others None. `dtype` defaults to the
    parameter's.
    """
    world = params.world
    # Replicas are equal: the first one gathers over tp, and its first tensor ranks then broadcast along the stages.
    if not world.leads(world.mesh.batch_axes):
        return None
    site = f"gather {spec.name}"
    if params.is_first_owner(spec):
        if local is None:
            fact = "has no gradient on this rank, and one on others"
            raise PlanError(spec.name, fact, "change gradients on all ranks alike: optimizer.zero_grad()")
        full = local.detach()
        if spec.shard:
            parts = shard_group(spec, world).all_gather(full.unsqueeze(0), 0, site).unbind()
            full = join_shards(parts, spec.cut_dim, spec.outer, spec.padded_size(world.mesh))
    else:
        full = torch.empty(spec.shape, dtype=dtype or dtype_of(spec.storage.dtype), device=world.device)
    if not world.leads(world.mesh.value_axes):
        return None
    full = world.group(world.mesh.stage_axes).broadcast(full, owners(params.program, spec)[0], site)
    world.mark()
    return full.to("cpu", copy=True) if world.rank == 0 else None


def gather_parameters(params: RankParameters) -> dict[str, torch.Tensor]:
    """Return all parameters as full CPU tensors under all their names on rank 0, {} elsewhere; a collective."""
    values: dict[str, torch.Tensor] = {}
    for spec in params.specs:
        full = gather_full(params, spec, params.local.get(spec.name))
        if full is not None:
            values |= dict.fromkeys((spec.name, *spec.aliases), full)
    return values


def gather_gradients(params: RankParameters) -> dict[str, torch.Tensor]:
    """Return all gradients as `gather_parameters` returns values; a parameter without one is absent."""
    # Gathering one is a collective of all ranks, so all must know which ones exist.
    mine = [name for name in params.local if params.gradient(name) is not None]
    everywhere = params.world.everyone().gather_objects(mine, "which gradients exist")
    present = set().union(*everywhere)
    gradients: dict[str, torch.Tensor] = {}
    for spec in params.specs:
        if spec.name not in present:
            continue
        dtype = dtype_of(spec.storage.sum_dtype)
        own = params.gradient(spec.name)
        full = gather_full(params, spec, None if own is None else own.to(dtype), dtype)
        if full is not None:
            gradients |= dict.fromkeys((spec.name, *spec.aliases), full)
    return gradients


@torch.no_grad()
def load_parameters(params: RankParameters, full: Mapping[str, torch.Tensor]) -> None:
    """Copy this rank's parts of full tensors, by first or any other name, into its parameters; absent ones stay."""
    for spec in params.specs:
        names = [name for name in (spec.name, *spec.aliases) if name in full]
        if names and spec.name in params.local:
            # As in torch, which copies name after name: the last one of a tied parameter stays.
            params.local[spec.name].copy_(shard_of(spec, full[names[-1]], params.world))


def check_loaded(
    program: Program, others: Mapping[str, torch.Tensor], full: Mapping[str, Any]
) -> tuple[list[str], list[str]]:
    """Return (missing, unexpected) names of a state dict; a PlanError lists all wrong shapes."""
    shapes: dict[str, tuple[int, ...]] = {}
    for spec in program.params:
        shapes |= dict.fromkeys((spec.name, *spec.aliases), spec.shape)
    shapes |= {name: tuple(x.shape) for name, x in others.items()}
    wrong = [
        f"{name} has shape {tuple(full[name].shape)}, not {shape}"
        for name, shape in shapes.items()
        if name in full and tuple(full[name].shape) != tuple(shape)
    ]
    if wrong:
        raise PlanError(
            "load_state_dict", "; ".join(wrong), "load the state dict of a model with the same sizes"
        )
    return [name for name in shapes if name not in full], [name for name in full if name not in shapes]
