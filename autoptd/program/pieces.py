"""Find the parts of every parameter that each rank stores, and the rank that writes or reads each part.

In: a program. Out: rectangles of full tensors (`ir/rectangles.py`) by rank. Every rank computes them locally
from integers, so planning a checkpoint needs no communication.

    stored(program, rank=5)["h.0.attn.c_attn.weight"]          # three rectangles: q, k and v
    shares = share_stage(program, 0, {"wte.weight": {"exp_avg": 4, "exp_avg_sq": 4}})
    shares.items[5]                                            # what rank 5 writes

Ranks that store the same elements, such as replicas and tensor ranks with copies, divide them by bytes. A
tied parameter belongs to the first pipeline rank that uses it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from autoptd.ir.mesh import Mesh
from autoptd.ir.placement import itemsize
from autoptd.ir.rectangles import Item, Range, Rectangle, own_runs, pieces, share
from autoptd.program.buckets import BucketPlan, plan_buckets
from autoptd.program.program import Program
from autoptd.program.specs import ParamSpec

# For every parameter, the optimizer state tensors of its shape, with the bytes per element.
StateKeys = Mapping[str, Mapping[str, int]]


@dataclass(frozen=True)
class Shares:
    """The parts that each rank of one pipeline rank writes, and the rank with each parameter's first element."""

    items: dict[int, list[Item]]
    first: dict[str, int]


def stored(program: Program, rank: int) -> dict[str, list[Rectangle]]:
    """Return the parts that a rank stores of every parameter its stages use; with ZeRO some may be empty."""
    mesh = program.mesh
    pipeline_rank = mesh.pipeline_rank_of(rank)
    places = flat_places(program, pipeline_rank)
    return {
        spec.name: _stored(spec, mesh, rank, places.get(spec.name))
        for spec in program.params
        if pipeline_rank in spec.owners(program.ranks)
    }


def flat_places(program: Program, pipeline_rank: int) -> dict[str, tuple[BucketPlan, int]]:
    """Return for each parameter the bucket that replicas share, and its start in that bucket."""
    mesh = program.mesh
    places: dict[str, tuple[BucketPlan, int]] = {}
    # Planning the buckets of a large model is slow.
    if not any(spec.sharing_axes for spec in program.params):
        return places
    for plan in plan_buckets(program.params, program.orders, program.ranks, mesh, pipeline_rank):
        if plan.parts(mesh) > 1:
            places |= {place.spec.name: (plan, place.start) for place in plan.places(mesh)}
    return places


def _stored(spec: ParamSpec, mesh: Mesh, rank: int, place: tuple[BucketPlan, int] | None) -> list[Rectangle]:
    flat = None
    local = spec.local_shape(mesh)
    if place is not None:
        flat = flat_range(spec, mesh, rank, place)
        if flat.start >= flat.end:
            return []
    axis = spec.shard_axis(mesh)
    if axis is None:
        return pieces(spec.shape, None, (), flat=flat)
    dim = spec.cut_dim
    is_padded = bool(spec.padded_size(mesh))
    index = mesh.place(rank, axis)
    runs = own_runs(spec.shape[dim], spec.outer, index, mesh.degree(axis), is_padded)
    return pieces(spec.shape, dim, runs, local[dim], flat)


def flat_range(spec: ParamSpec, mesh: Mesh, rank: int, place: tuple[BucketPlan, int]) -> Range:
    """Return the range of its part of a parameter that a rank stores; empty if the end is not after the
    start.
    """
    plan, first = place
    width = plan.numel(mesh) // plan.parts(mesh)
    begin = mesh.group(rank, plan.sharing_axes).index(rank) * width - first
    numel = 1
    for size in spec.local_shape(mesh):
        numel *= size
    return Range(max(begin, 0), min(begin + width, numel))


def holders(spec: ParamSpec, mesh: Mesh, rank: int) -> tuple[int, ...]:
    """Return the ranks at the same pipeline rank that store the same part of a parameter as `rank`."""
    return mesh.group(rank, holder_axes(spec, mesh))


def holder_axes(spec: ParamSpec, mesh: Mesh) -> tuple[str, ...]:
    """Return the axes and sub-axes along which ranks store copies of a parameter, ordered alike on all ranks."""
    return tuple(axis for axis in spec.copy_axes(mesh) if mesh.degree(axis) > 1)


def share_stage(program: Program, pipeline_rank: int, keys: StateKeys) -> Shares:
    """Divide the parameters that belong to a pipeline rank, and their optimizer state, over its ranks.

    With ZeRO, a rank's share depends only on the keys of parameters that it stores in part.
    """
    ranks = program.mesh.ranks_at(pipeline_rank)
    items: dict[int, list[Item]] = {rank: [] for rank in ranks}
    first: dict[str, int] = {}
    groups: dict[tuple[str, ...], list[tuple[int, ...]]] = {}
    places = flat_places(program, pipeline_rank)
    # Flat ranges are divided separately, as a rank does not have the keys in the other ranges.
    for is_flat in (True, False):
        held: dict[tuple[int, ...], list[Item]] = {}
        for spec in owned(program, pipeline_rank):
            if (spec.name in places) == is_flat:
                for group, found in stored_by_groups(spec, program.mesh, ranks, places, groups):
                    held.setdefault(group, []).extend(_items(spec, found, keys.get(spec.name, {})))
                    if _has_first(found) or spec.name not in first:
                        first[spec.name] = group[0]
        loads = dict.fromkeys(ranks, 0)
        # Divide parts with few holders first, so that the others even out the rest.
        for group in sorted(held, key=lambda group: (len(group), group)):
            for rank, some in share(held[group], loads, group).items():
                items[rank] += some
    return Shares(items, first)


def checkpoint_bytes(program: Program, keys: StateKeys) -> tuple[int, int]:
    """Return the bytes that all ranks write together, for parameters and for their optimizer state."""
    sums, counts = [0, 0], dict[object, int]()
    for pipeline_rank in range(program.mesh.pipeline_ranks):
        groups: dict[tuple[str, ...], list[tuple[int, ...]]] = {}
        ranks = program.mesh.ranks_at(pipeline_rank)
        places = flat_places(program, pipeline_rank)
        for spec in owned(program, pipeline_rank):
            # Layers are alike, unless their parameters lie at different positions in flat ranges.
            kind = spec.name if spec.name in places else (spec.shape, spec.dims, spec.use, spec.storage)
            if kind not in counts:
                found = stored_by_groups(spec, program.mesh, ranks, places, groups)
                counts[kind] = sum(part.numel for _, parts in found for part in parts)
            sums[0] += counts[kind] * itemsize(spec.storage.dtype)
            sums[1] += counts[kind] * sum(keys.get(spec.name, {}).values())
    return sums[0], sums[1]


def owned(program: Program, pipeline_rank: int) -> list[ParamSpec]:
    """Return the parameters that a pipeline rank writes; a tied one is written by its first user."""
    return [spec for spec in program.params if spec.owners(program.ranks)[0] == pipeline_rank]


def stored_by_groups(
    spec: ParamSpec,
    mesh: Mesh,
    ranks: Sequence[int],
    places: Mapping[str, tuple[BucketPlan, int]],
    groups: dict[tuple[str, ...], list[tuple[int, ...]]],
) -> Iterator[tuple[tuple[int, ...], list[Rectangle]]]:
    """Yield the groups of `ranks` that store the same part of a parameter, with that part; together they
    cover it once.

    `groups` caches groups by their axes.
    """
    axes = holder_axes(spec, mesh)
    if axes not in groups:
        groups[axes] = sorted({mesh.group(rank, axes) for rank in ranks})
    for group in groups[axes]:
        yield group, _stored(spec, mesh, group[0], places.get(spec.name))


def _items(spec: ParamSpec, found: list[Rectangle], keys: Mapping[str, int]) -> list[Item]:
    sizes = {"": itemsize(spec.storage.dtype), **dict(sorted(keys.items()))}
    return [Item(spec.name, key, part, size) for key, size in sizes.items() for part in found]


def _has_first(found: list[Rectangle]) -> bool:
    return any(not any(part.offsets) for part in found)


def view_of(x: torch.Tensor, part: Rectangle) -> torch.Tensor:
    """Return the elements of a rectangle in a rank's stored tensor, as a view."""
    view = x.detach().view(-1).narrow(0, part.start, math.prod(part.block)).view(part.block)
    for dim, (at, size) in enumerate(zip(part.at, part.sizes, strict=True)):
        view = view.narrow(dim, at, size)
    return view
