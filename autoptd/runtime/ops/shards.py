"""Cut a tensor into shards and join them again: pure tensor functions.

A dim of N elements is viewed as [blocks, N / blocks]; rank `index` of `degree` owns the contiguous chunk
`index` of the second factor in each of the blocks. With blocks = 1 that is one contiguous slice; a fused QKV
weight `[3 x heads x k, h]` split by heads has blocks = 3, so that a shard is three row blocks. Blocks of
unequal sizes (q, k and v of grouped queries) are given by these sizes instead: blocks = (64, 32, 32).

    take_shard(torch.arange(6), dim=0, blocks=3, index=1, degree=2).tolist() == [1, 3, 5]
    join_shards([take_shard(x, 0, 3, i, 2) for i in range(2)], 0, 3)  # is x

With `Zigzag(3)` instead of 3, each block has 2 * degree pieces, and rank i owns the pieces i and 2 * degree -
1 - i.

    take_shard(torch.arange(8), 0, Zigzag(), index=0, degree=2).tolist() == [0, 1, 6, 7]

A dim of `size` elements that the ranks do not divide (a vocabulary) is *padded*: shards are equally long
(`ir.types.shard_size`), and zeros fill up the last ones. Callers pass `size` for such a dim; without it, a
dim that the ranks do not divide is an InternalError:

    take_shard(torch.arange(1, 6), 0, 1, index=2, degree=3, size=5).tolist() == [5, 0]
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from autoptd.errors import InternalError
from autoptd.ir.types import Outer, Zigzag, shard_size


def take_shard(
    x: torch.Tensor, dim: int, blocks: Outer, index: int, degree: int, size: int = 0
) -> torch.Tensor:
    """Return shard `index` of `degree`, contiguous; it shares no memory with `x` unless it is all of it."""
    if degree == 1:
        return x
    dim = dim % x.ndim
    if size:
        return _take_padded(x, dim, index, _padded_width(size, blocks, degree), size)
    if isinstance(blocks, Zigzag):
        pieces = _pieces(x, dim, blocks, 2 * degree)
        both = (pieces.narrow(dim + 1, i, 1) for i in (index, 2 * degree - 1 - index))
        return torch.cat(list(both), dim + 1).flatten(dim, dim + 2)
    if not isinstance(blocks, int):
        parts = [take_shard(block, dim, 1, index, degree) for block in x.split(list(blocks), dim)]
        return torch.cat(parts, dim)
    # [..., blocks, degree * width, ...]: this rank's `width` entries of every block.
    viewed = x.unflatten(dim, (blocks, _chunk(x.shape[dim], blocks * degree) * degree))
    width = viewed.shape[dim + 1] // degree
    part = viewed.narrow(dim + 1, index * width, width)
    return part.clone(memory_format=torch.contiguous_format).flatten(dim, dim + 1)


def join_shards(parts: Sequence[torch.Tensor], dim: int, blocks: Outer, size: int = 0) -> torch.Tensor:
    """Join shards, given in order of index, into the whole tensor: the inverse of `take_shard`."""
    if len(parts) == 1:
        return parts[0]
    dim = dim % parts[0].ndim
    if size:
        width = _padded_width(size, blocks, len(parts))
        # Without their padding; the last shards may have nothing else.
        real = [part.narrow(dim, 0, real_rows(size, width, i)) for i, part in enumerate(parts)]
        return torch.cat(real, dim)
    if blocks == 1:
        return torch.cat(list(parts), dim)
    if isinstance(blocks, Zigzag):
        halves = [_pieces(part, dim, blocks, 2) for part in parts]
        first = [half.narrow(dim + 1, 0, 1) for half in halves]
        second = [half.narrow(dim + 1, 1, 1) for half in halves]
        return torch.cat([*first, *reversed(second)], dim + 1).flatten(dim, dim + 2)
    if not isinstance(blocks, int):
        widths = [_chunk(block, len(parts)) for block in blocks]
        by_rank = [part.split(widths, dim) for part in parts]
        # The first block of all ranks, then the second one, ...
        pieces = [piece for block in zip(*by_rank, strict=True) for piece in block]
        return torch.cat(pieces, dim)
    width = _chunk(parts[0].shape[dim], blocks)
    return torch.cat([part.unflatten(dim, (blocks, width)) for part in parts], dim + 1).flatten(dim, dim + 1)


def pad_shard(
    x: torch.Tensor, dim: int, blocks: Outer, index: int, degree: int, size: int = 0
) -> torch.Tensor:
    """Return a tensor of the whole's size that holds shard `x` in its place and zeros elsewhere."""
    if degree == 1:
        return x
    dim = dim % x.ndim
    if size:
        width = _padded_width(size, blocks, degree)
        real = real_rows(size, width, index)
        whole = x.new_zeros([*x.shape[:dim], size, *x.shape[dim + 1 :]])
        # `min`: a shard of padding only starts beyond the end, where narrow refuses even no entries.
        whole.narrow(dim, min(index * width, size), real).copy_(x.narrow(dim, 0, real))
        return whole
    if isinstance(blocks, Zigzag):
        halves = _pieces(x, dim, blocks, 2)
        size_of = [*halves.shape]
        size_of[dim + 1] = 2 * degree
        whole = x.new_zeros(size_of)
        for i, place in enumerate((index, 2 * degree - 1 - index)):
            whole.narrow(dim + 1, place, 1).copy_(halves.narrow(dim + 1, i, 1))
        return whole.flatten(dim, dim + 2)
    if not isinstance(blocks, int):
        widths = [_chunk(block, degree) for block in blocks]
        return torch.cat([pad_shard(block, dim, 1, index, degree) for block in x.split(widths, dim)], dim)
    width = _chunk(x.shape[dim], blocks)
    shape = [*x.shape[:dim], blocks, degree * width, *x.shape[dim + 1 :]]
    whole = x.new_zeros(shape)
    whole.narrow(dim + 1, index * width, width).copy_(x.unflatten(dim, (blocks, width)))
    return whole.flatten(dim, dim + 1)


def to_gather(x: torch.Tensor, dim: int, blocks: Outer) -> tuple[torch.Tensor, int]:
    """Return a shard in the form in which it is gathered, and the dim to gather along; `gathered_whole` follows."""
    dim = dim % x.ndim
    if blocks == 1:
        return x, dim
    if not isinstance(blocks, int):
        # Unequal blocks and zigzag pieces are not strided: gather rank by rank, for `join_shards` to order.
        return x.unsqueeze(0), 0
    return x.unflatten(dim, (blocks, _chunk(x.shape[dim], blocks))), dim + 1


def gathered_whole(x: torch.Tensor, dim: int, blocks: Outer, size: int = 0) -> torch.Tensor:
    """Return the whole value from the gathered result of `to_gather`; a view of it if `blocks` is a number."""
    if not isinstance(blocks, int):
        return join_shards(x.unbind(0), dim, blocks)
    if blocks > 1:
        dim = dim % (x.ndim - 1)
        return x.flatten(dim, dim + 1)
    return x.narrow(dim, 0, size) if size else x


def to_scatter(
    x: torch.Tensor, dim: int, blocks: Outer, degree: int, size: int = 0
) -> tuple[torch.Tensor, int]:
    """Return a whole value in the form in which equal parts along a dim are the ranks' shards, and this dim.

    `scattered_shard` follows.
    """
    dim = dim % x.ndim
    if size:
        padding = _padded_width(size, blocks, degree) * degree - _real_size(x, dim, size)
        # F.pad takes pairs (before, after) from the last dim to the first.
        return F.pad(x, (0, 0) * (x.ndim - 1 - dim) + (0, padding)), dim
    if blocks == 1:
        return x, dim
    if not isinstance(blocks, int):
        return torch.stack([take_shard(x, dim, blocks, index, degree) for index in range(degree)]), 0
    return x.unflatten(dim, (blocks, _chunk(x.shape[dim], blocks))), dim + 1


def scattered_shard(x: torch.Tensor, dim: int, blocks: Outer) -> torch.Tensor:
    """Return a shard from the part of the result of `to_scatter` that this rank received."""
    if blocks == 1:
        return x
    if not isinstance(blocks, int):
        return x.squeeze(0)
    dim = dim % (x.ndim - 1)
    return x.flatten(dim, dim + 1)


def real_rows(size: int, width: int, index: int) -> int:
    """Return how many of the `width` entries of shard `index` are not padding, of a dim of `size` (0: no padding)."""
    return min(max(size - index * width, 0), width) if size else width


def _take_padded(x: torch.Tensor, dim: int, index: int, width: int, size: int) -> torch.Tensor:
    real = real_rows(_real_size(x, dim, size), width, index)
    # A small dim may leave the last ranks nothing but padding, from beyond its end.
    part = x.new_zeros([*x.shape[:dim], width, *x.shape[dim + 1 :]])
    part.narrow(dim, 0, real).copy_(x.narrow(dim, min(index * width, size), real))
    return part


def _real_size(x: torch.Tensor, dim: int, size: int) -> int:
    """Return `size`, after checking that the whole `x` has it."""
    if x.shape[dim] != size:
        raise InternalError(f"a padded dim of {size}", f"has {x.shape[dim]} entries")
    return size


def _padded_width(size: int, blocks: Outer, degree: int) -> int:
    if blocks != 1:
        raise InternalError(f"a padded dim of {size}", f"has {blocks} blocks, where one is planned")
    return shard_size(size, degree)


def _pieces(x: torch.Tensor, dim: int, blocks: Zigzag, count: int) -> torch.Tensor:
    """View a dim as [blocks, count, width]."""
    return x.unflatten(dim, (blocks.blocks, count, _chunk(x.shape[dim], blocks.blocks * count)))


def _chunk(size: int, parts: int) -> int:
    if size % parts:
        raise InternalError(f"a dim of {size}", f"does not divide into {parts} parts")
    return size // parts
