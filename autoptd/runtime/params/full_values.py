"""Gather full tensors under the model's own names from the storage of ranks, and load them into it.

In: a rank's parameters. Out: on rank 0, the CPU tensors of the unmodified model; or, in every rank's storage,
its part of such tensors. All but `load_parameters` and `check_loaded` are collectives of all ranks.

    full = gather_full(params, spec, params.stored.get(spec.name))       # on rank 0
    values, gradients = gather_parameters(params), gather_gradients(params)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from autoptd.errors import PlanError
from autoptd.program.program import Program
from autoptd.program.specs import ParamSpec
from autoptd.runtime.ops.shards import join_shards
from autoptd.runtime.params.parameters import RankParameters, owners
from autoptd.runtime.params.parts import dtype_of, shard_group, shard_of


def gather_full(
    params: RankParameters, spec: ParamSpec, local: torch.Tensor | None, dtype: torch.dtype | None = None
) -> torch.Tensor | None:
    """Return on rank 0 the full CPU tensor whose local part is `local`; None elsewhere.

    A collective of all ranks: owners pass their stored part (laid out as `RankParameters.stored`), others
    None. `dtype` defaults to that of the storage.
    """
    world = params.world
    site = f"gather {spec.name}"
    if params.is_first_owner(spec):
        stored_dtype = dtype_of(spec.storage.dtype) if dtype is None else dtype
        local = params.local_of(spec.name, local, stored_dtype)
    # Replicas are equal: the first one gathers over tp, and its first tensor ranks then broadcast along the stages.
    if not world.leads(world.mesh.batch_axes):
        return None
    if params.is_first_owner(spec):
        if local is None:
            fact = "has a gradient on other ranks, but not on this one"
            raise PlanError(
                spec.name, fact, "change gradients in the same way on all ranks: optimizer.zero_grad()"
            )
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
    params.absorb_edits()
    values: dict[str, torch.Tensor] = {}
    for spec in params.specs:
        full = gather_full(params, spec, params.stored.get(spec.name))
        if full is not None:
            full = full.to(dtype_of(spec.dtype))
            values |= dict.fromkeys((spec.name, *spec.aliases), full)
    return values


def gather_gradients(params: RankParameters) -> dict[str, torch.Tensor]:
    """Return all gradients in the form of `gather_parameters`, without parameters that have none."""
    # Gathering one is a collective of all ranks, so all must know which ones exist.
    mine = [name for name in params.stored if params.gradient(name) is not None]
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
    """Copy this rank's parts of full tensors into its parameters, by any of their names."""
    # A pending gather would overwrite the loaded values.
    params.wait()
    for spec in params.specs:
        names = [name for name in (spec.name, *spec.aliases) if name in full]
        if names and spec.name in params.local:
            # As in torch, which copies name after name: the last one of a tied parameter stays.
            params.load(spec, shard_of(spec, full[names[-1]], params.world))


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
