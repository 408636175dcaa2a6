"""What an evaluation returns besides the loss: gathered from the stages and the microbatches of a replica.

In: a program's `outputs`, and what the stages of this rank kept. Out: tensors by name, on every rank of the replica: the
rows of that replica, sums over the whole batch, values that no row changes.

    found = gathered(program, executor.outputs, world, microbatches=4)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from autoptd.program.program import Program
from autoptd.program.specs import OutputSpec
from autoptd.runtime.world.world import World

SITE = "outputs"


def gathered(
    program: Program, kept: Mapping[str, list[torch.Tensor]], world: World, microbatches: int
) -> dict[str, torch.Tensor]:
    """Return the outputs of an evaluation of `microbatches` microbatches in this replica. Collective."""
    return {
        spec.name: _gathered(spec, program, kept.get(spec.name, ()), world, microbatches)
        for spec in program.outputs
    }


def _gathered(
    spec: OutputSpec, program: Program, kept: Sequence[torch.Tensor], world: World, microbatches: int
) -> torch.Tensor:
    dtype, mesh = getattr(torch, spec.dtype), world.mesh
    if spec.how == "rows":
        shape = (microbatches * spec.shape[0], *spec.shape[1:])
        return _from_any(torch.cat(list(kept)) if kept else None, shape, dtype, world, mesh.stage_axes)
    axes = (*mesh.batch_axes, *mesh.stage_axes)
    if spec.how == "sum":
        own = (
            torch.stack(list(kept)).sum(0, dtype=dtype)
            if kept
            else torch.zeros(spec.shape, dtype=dtype, device=world.device)
        )
        return world.hops(axes).all_reduce(own, SITE)
    # Some replicas may have no rows: the first with rows tells the others.
    teller = next((number for number, rows in enumerate(program.row_counts) if rows), 0)
    # A copy: it may be a weight.
    told = kept[0].clone() if kept and world.replica == teller else None
    return _from_any(told, spec.shape, dtype, world, axes)


def _from_any(
    own: torch.Tensor | None, shape: Sequence[int], dtype: torch.dtype, world: World, axes: tuple[str, ...]
) -> torch.Tensor:
    """Return the tensor of the one rank along `axes` that has it, bit by bit."""
    x = torch.zeros(shape, dtype=dtype, device=world.device) if own is None else own.contiguous()
    return _sum_of_bytes(x, world, axes)


def _sum_of_bytes(x: torch.Tensor, world: World, axes: tuple[str, ...]) -> torch.Tensor:
    """Return the entries of the one rank along `axes` where they are not 0."""
    if all(world.mesh.degree(axis) == 1 for axis in axes) or not x.numel():
        return x
    return world.hops(axes).all_reduce(x.view(-1).view(torch.uint8), SITE).view(x.dtype).view(x.shape)


def of_all_replicas(
    program: Program, found: Mapping[str, torch.Tensor], world: World
) -> dict[str, torch.Tensor]:
    """Return outputs with the rows of all replicas, on every rank. Collective."""
    whole, mesh = dict(found), world.mesh
    for spec in program.outputs:
        x = found[spec.name]
        if spec.how == "rows" and mesh.replicas > 1:
            sizes = [len(x)] * mesh.replicas
            if program.row_counts:
                sizes = [rows * spec.shape[0] // program.rows for rows in program.row_counts]
            first = sum(sizes[: world.replica])
            rows = x.new_zeros(sum(sizes), *x.shape[1:])
            rows[first : first + len(x)] = x
            whole[spec.name] = _sum_of_bytes(rows, world, mesh.batch_axes)
    return whole


def joined(program: Program, by_replica: Mapping[int, dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return the outputs of the rows of several replicas."""
    parts = [by_replica[number] for number in sorted(by_replica)]
    found = dict(parts[0])
    for spec in program.outputs:
        if spec.how == "rows":
            found[spec.name] = torch.cat([part[spec.name] for part in parts])
    return found


__all__ = ["SITE", "gathered", "joined", "of_all_replicas"]
