"""The conversions between value types, one differentiable function per row of `ir.types.CONVERSIONS`.

In: this rank's tensor and the group of ranks of one mesh axis. Out: this rank's tensor of the new type. An S value is
the local shard (`shards.py` defines `dim`, `blocks` and the `size` of a padded dim). `site` names the emitted line in
errors.

    y = p_to_i(F.linear(x, w), tp, site="h.0.mlp.c_proj")     # Megatron's g

Over a group of one rank every conversion is the identity. The comments f, g name the operators of Shoeybi et al. 2019,
section 3; g bar and its conjugate are those of Korthikanti et al. 2022, section 4.2.2. Cotangents from autograd may be
strided or expanded; every function below makes contiguous what it sends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from autoptd.ir.types import Outer
from autoptd.runtime.ops.shards import (
    gathered_whole,
    join_shards,
    pad_shard,
    scattered_shard,
    take_shard,
    to_gather,
    to_scatter,
)
from autoptd.runtime.world.world import Group, Pending, Then

Tensor = torch.Tensor
Direction = Callable[[Tensor, Group, str], Tensor]


def i_to_r(x: Tensor, group: Group, *, inplace: bool = False, site: str = "") -> Tensor:
    """Forward: none. Backward: all-reduce. Megatron's f.

    `inplace`: the gradient of the result is summed in place. Nothing else may hold it: GEMMs make it.
    """
    return _convert(x, group, _keep, _sum_in_place if inplace else _sum, site)


def p_to_i(x: Tensor, group: Group, *, inplace: bool = False, site: str = "") -> Tensor:
    """Forward: all-reduce. Backward: none. Megatron's g.

    `inplace`: `x` itself is summed. Nothing else may read it, and no backward may need it: a GEMM made it. Autograd need
    not know of the sum, since the gradient passes through unchanged.
    """
    if group.size == 1:
        return x
    y = x if inplace else x.clone(memory_format=torch.contiguous_format)
    # `.data` rather than `detach`, whose writes autograd counts: where `y` is a view, as a linear's result may be, it
    # would rebuild the graph of `y`, or refuse. passes/hook_gemms.py ensures that no backward needs the
    # old value.
    group.all_reduce_(y.data, site)
    return y


def p_to_r(x: Tensor, group: Group, *, site: str = "") -> Tensor:
    """Forward: all-reduce. Backward: all-reduce. g, then f."""
    return _convert(x, group, _sum, _sum, site)


def p_to_s(x: Tensor, group: Group, dim: int, blocks: Outer = 1, *, size: int = 0, site: str = "") -> Tensor:
    """Forward: reduce-scatter. Backward: all-gather. The sequence-parallel g bar."""
    return _convert(x, group, _scatter(dim, blocks, size), _gather(dim, blocks, size), site)


def i_to_p(x: Tensor, group: Group, *, site: str = "") -> Tensor:
    """Forward: one rank keeps it, the others hold zeros. Backward: none. A bias that must be added once.

    Every rank gets an autograd node: where `x` has other readers, all ranks then add up its gradients in the same order,
    and their sums are equal to the bit.
    """
    if group.index == 0:
        return x.view_as(x) if group.size > 1 else x
    # Zeroing a clone passes the gradient through; a custom autograd function is five times slower.
    y = x.clone()
    y.detach().zero_()
    return y


def r_to_i(x: Tensor, group: Group, *, site: str = "") -> Tensor:
    """Forward: none. Backward: one rank keeps the cotangent, which is equal on all, so that their sum is right."""
    return _convert(x, group, _keep, _one_rank, site)


def r_to_p(x: Tensor, group: Group, *, site: str = "") -> Tensor:
    """Forward: one rank keeps it. Backward: one rank keeps it."""
    return _convert(x, group, _one_rank, _one_rank, site)


def s_to_r(x: Tensor, group: Group, dim: int, blocks: Outer = 1, *, size: int = 0, site: str = "") -> Tensor:
    """Forward: all-gather. Backward: reduce-scatter. The sequence-parallel g, the conjugate of g bar."""
    return _convert(x, group, _gather(dim, blocks, size), _scatter(dim, blocks, size), site)


def s_to_i(x: Tensor, group: Group, dim: int, blocks: Outer = 1, *, size: int = 0, site: str = "") -> Tensor:
    """Forward: all-gather. Backward: slice. The scatter/gather optimisation's gather (SC'21, section 4.1)."""
    return _convert(x, group, _gather(dim, blocks, size), _slice(dim, blocks, size), site)


def i_to_s(x: Tensor, group: Group, dim: int, blocks: Outer = 1, *, size: int = 0, site: str = "") -> Tensor:
    """Forward: slice. Backward: all-gather. The scatter/gather optimisation's scatter (SC'21, section 4.1)."""
    return _convert(x, group, _slice(dim, blocks, size), _gather(dim, blocks, size), site)


def r_to_s(x: Tensor, group: Group, dim: int, blocks: Outer = 1, *, size: int = 0, site: str = "") -> Tensor:
    """Forward: slice. Backward: zero-pad."""
    return _convert(x, group, _slice(dim, blocks, size), _pad(dim, blocks, size), site)


def s_to_p(x: Tensor, group: Group, dim: int, blocks: Outer = 1, *, size: int = 0, site: str = "") -> Tensor:
    """Forward: zero-pad. Backward: slice."""
    return _convert(x, group, _pad(dim, blocks, size), _slice(dim, blocks, size), site)


def s_to_s(
    x: Tensor, group: Group, dim: int, to_dim: int, *, blocks: Outer = 1, to_blocks: Outer = 1, site: str = ""
) -> Tensor:
    """Forward: all-to-all, from sharded by (`dim`, `blocks`) to by (`to_dim`, `to_blocks`). Backward: the reverse.

    Within one dim (only `blocks` differ) each direction is an all-gather and a slice.
    """
    dim, to_dim = dim % x.ndim, to_dim % x.ndim
    forward = _Exchange(dim, blocks, to_dim, to_blocks)
    backward = _Exchange(to_dim, to_blocks, dim, blocks)
    return _convert(x, group, forward, backward, site)


def gather(x: Tensor, group: Group, dim: int, blocks: Outer = 1, *, size: int = 0, site: str = "") -> Tensor:
    """Return the whole value of shards `x`, without a gradient."""
    return _gather(dim, blocks, size)(x, group, site)


def gather_start(x: Tensor, group: Group, dim: int, blocks: Outer = 1, *, site: str = "") -> Pending:
    """Start `gather`; `x` must not be changed before `wait()`."""
    shard, along = to_gather(x, dim, blocks)
    return Then(group.all_gather_start(shard, along, site), lambda whole: gathered_whole(whole, dim, blocks))


def scatter_start(x: Tensor, group: Group, dim: int, blocks: Outer = 1, *, site: str = "") -> Pending:
    """Start a reduce-scatter of `x` to shards, without a gradient; `x` must not be changed before `wait()`."""
    whole, along = to_scatter(x, dim, blocks, group.size)
    return Then(
        group.reduce_scatter_start(whole, along, site), lambda shard: scattered_shard(shard, dim, blocks)
    )


# The directions of conversions: from a tensor of one type to one of another, without autograd.


def _keep(x: Tensor, group: Group, site: str) -> Tensor:
    return x


def _sum(x: Tensor, group: Group, site: str) -> Tensor:
    return group.all_reduce(x, site)


def _sum_in_place(x: Tensor, group: Group, site: str) -> Tensor:
    return group.all_reduce_(x, site)


def _one_rank(x: Tensor, group: Group, site: str) -> Tensor:
    return x if group.index == 0 else torch.zeros_like(x)


class _Sharding:
    """Base of the directions from or to shards of (dim, blocks)."""

    def __init__(self, dim: int, blocks: Outer, size: int) -> None:
        self.dim, self.blocks, self.size = dim, blocks, size


# Lower case, because they are used as functions with parameters: `_gather(dim, blocks, size)` is a direction.
class _gather(_Sharding):
    def __call__(self, x: Tensor, group: Group, site: str) -> Tensor:
        shard, dim = to_gather(x, self.dim, self.blocks)
        return gathered_whole(group.all_gather(shard, dim, site), self.dim, self.blocks, self.size)


class _scatter(_Sharding):
    def __call__(self, x: Tensor, group: Group, site: str) -> Tensor:
        whole, dim = to_scatter(x, self.dim, self.blocks, group.size, self.size)
        return scattered_shard(group.reduce_scatter(whole, dim, site), self.dim, self.blocks)


class _slice(_Sharding):
    def __call__(self, x: Tensor, group: Group, site: str) -> Tensor:
        return take_shard(x, self.dim, self.blocks, group.index, group.size, self.size)


class _pad(_Sharding):
    def __call__(self, x: Tensor, group: Group, site: str) -> Tensor:
        return pad_shard(x, self.dim, self.blocks, group.index, group.size, self.size)


class _Exchange(_Sharding):
    """From shards of (dim, blocks) to shards of (to_dim, to_blocks)."""

    def __init__(self, dim: int, blocks: Outer, to_dim: int, to_blocks: Outer) -> None:
        super().__init__(dim, blocks, 0)
        self.to_dim, self.to_blocks = to_dim, to_blocks

    def __call__(self, x: Tensor, group: Group, site: str) -> Tensor:
        if self.dim == self.to_dim:
            if self.blocks == self.to_blocks:
                return x
            # Within one dim, a new shard may take entries from every rank: from 3 blocks to 1, say.
            whole = gather(x, group, self.dim, self.blocks, site=site)
            return take_shard(whole, self.to_dim, self.to_blocks, group.index, group.size)
        # Part i is what rank i will own along `to_dim`; the parts received lie along `dim`.
        parts = [take_shard(x, self.to_dim, self.to_blocks, index, group.size) for index in range(group.size)]
        return join_shards(group.all_to_all(parts, site), self.dim, self.blocks)


class _Directions(NamedTuple):
    """A conversion: what it does forward and backward, and over which ranks."""

    forward: Direction
    backward: Direction
    group: Group
    site: str


class _Converted(torch.autograd.Function):
    """Runs one direction forward and another backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, how: _Directions) -> Tensor:
        ctx.how = how
        y = how.forward(x, how.group, how.site)
        # Autograd does not accept an input as the output.
        return x.view_as(x) if y is x else y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        how: _Directions = ctx.how
        # The suffix tells this call from the forward's in faults and records (`record._place` strips it).
        return how.backward(grad, how.group, f"{how.site} backward"), None


def _convert(x: Tensor, group: Group, forward: Direction, backward: Direction, site: str) -> Tensor:
    if group.size == 1:
        return x
    return _Converted.apply(x, _Directions(forward, backward, group, site))  # type: ignore[no-any-return, no-untyped-call]
