"""Cut a tensor into shards and join them again: pure tensor functions.

A dim of N elements is viewed as [outer, N / outer]; rank `index` of `degree` owns the contiguous chunk `index` of the
second factor in each of the `outer` blocks. With outer = 1 that is one contiguous slice; a fused QKV weight `[3 x
heads x k, h]` split by heads has outer = 3, so that a shard is three row blocks.

    take_shard(torch.arange(6), dim=0, outer=3, index=1, degree=2).tolist() == [1, 3, 5]
    join_shards([take_shard(x, 0, 3, i, 2) for i in range(2)], 0, 3)  # is x
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autoptd.errors import InternalError


def take_shard(x: torch.Tensor, dim: int, outer: int, index: int, degree: int) -> torch.Tensor:
    """Return shard `index` of `degree`, contiguous; it shares no memory with `x` unless it is all of it."""
    if degree == 1:
        return x
    dim = dim % x.ndim
    blocks = x.unflatten(dim, (outer, _chunk(x.shape[dim], outer * degree) * degree))
    width = blocks.shape[dim + 1] // degree
    part = blocks.narrow(dim + 1, index * width, width)
    return part.clone(memory_format=torch.contiguous_format).flatten(dim, dim + 1)


def join_shards(parts: Sequence[torch.Tensor], dim: int, outer: int) -> torch.Tensor:
    """Return the whole of which `parts` are the shards, in order of index: the inverse of `take_shard`."""
    if len(parts) == 1:
        return parts[0]
    dim = dim % parts[0].ndim
    if outer == 1:
        return torch.cat(list(parts), dim)
    width = _chunk(parts[0].shape[dim], outer)
    return torch.cat([part.unflatten(dim, (outer, width)) for part in parts], dim + 1).flatten(dim, dim + 1)


def pad_shard(x: torch.Tensor, dim: int, outer: int, index: int, degree: int) -> torch.Tensor:
    """Return a tensor of the whole's size that holds shard `x` in its place and zeros elsewhere."""
    if degree == 1:
        return x
    dim = dim % x.ndim
    width = _chunk(x.shape[dim], outer)
    shape = [*x.shape[:dim], outer, degree * width, *x.shape[dim + 1 :]]
    whole = x.new_zeros(shape)
    whole.narrow(dim + 1, index * width, width).copy_(x.unflatten(dim, (outer, width)))
    return whole.flatten(dim, dim + 1)


def _chunk(size: int, parts: int) -> int:
    if size % parts:
        raise InternalError(f"a dim of {size}", f"does not divide into {parts} parts")
    return size // parts
