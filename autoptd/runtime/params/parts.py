"""Cut or read a rank's part of a parameter, and broadcast values of rank 0.

own = shard_of(spec, full, world)                    # the rows of this tensor rank
own = read_shard(spec, source.reader(), world)       # the same, without the full tensor
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from autoptd.errors import PlanError
from autoptd.program.sources import Reader
from autoptd.program.specs import ParamSpec
from autoptd.runtime.ops.shards import take_shard
from autoptd.runtime.world.world import Group, World


def dtype_of(name: str) -> torch.dtype:
    """Return `torch.float32` for "float32"."""
    return getattr(torch, name.removeprefix("torch."))  # type: ignore[no-any-return]


def by_dtype(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield lists of tensors of one dtype: torch's foreach operators process mixed lists one by one."""
    lists: dict[torch.dtype, list[torch.Tensor]] = {}
    for x in tensors:
        lists.setdefault(x.dtype, []).append(x)
    yield from lists.values()


def from_rank_0(world: World, name: str, x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return rank 0's `x` on this rank's device; a collective."""
    if x.is_meta and world.device.type != "meta":
        raise PlanError(
            name, "is on the meta device and has no values", "build the model in `with autoptd.deferred():`"
        )
    if world.rank == 0:
        own = x.detach().to(world.device, dtype)
    else:
        # The receive buffer: this rank's own values of `x` are not used.
        own = torch.empty(x.shape, dtype=dtype or x.dtype, device=world.device)
    return world.everyone().broadcast(own, f"start: {name}")


def read_shard(spec: ParamSpec, reader: Reader, world: World) -> torch.Tensor:
    """Read this rank's part of a parameter, in the parameter's dtype; PlanError if tied names differ."""
    names = [name for name in spec.aliases if reader.has(name)]
    if spec.shard:
        # Entries are numbered from 1: `own_entries` gives 0 for padding, which the reader fills with zeros.
        numbers = torch.arange(1, spec.shape[spec.cut_dim] + 1, device="cpu")
        rows = own_entries(spec, numbers, 0, world)
        parts = [reader.rows(name, spec.cut_dim, rows) for name in names]
    else:
        parts = [reader.whole(name) for name in names]
    parts = [part.to(dtype_of(spec.storage.dtype)) for part in parts]
    for name, part in zip(names[1:], parts[1:], strict=True):
        if not torch.equal(part, parts[0]):
            fact = f"is tied to {names[0]} in the model, but has other values in the files"
            raise PlanError(
                name, fact, "build the model untied (tie_word_embeddings=False), or correct the files"
            )
    return parts[0].to(world.device)


def shard_of(spec: ParamSpec, full: torch.Tensor, world: World) -> torch.Tensor:
    """Return this rank's part of a full tensor laid out like the parameter; may share its storage."""
    return own_entries(spec, full, spec.cut_dim, world) if spec.shard else full


def own_entries(spec: ParamSpec, x: torch.Tensor, dim: int, world: World) -> torch.Tensor:
    """Return this rank's part of `x`, whose `dim` is cut like the sharded dim of the parameter; zeros for padding."""
    return take_shard(x, dim, spec.outer, *own_piece(spec, world), spec.padded_size(world.mesh))


def own_piece(spec: ParamSpec, world: World) -> tuple[int, int]:
    """Return (index, count) of this rank's shard of a sharded parameter."""
    group = shard_group(spec, world)
    return group.index, group.size


def shard_group(spec: ParamSpec, world: World) -> Group:
    """Return the group of ranks that own the shards of a sharded parameter, in order."""
    axis = spec.shard_axis(world.mesh)
    assert axis is not None, f"{spec.name} is whole"
    return world.group((axis,))
