"""Simulate communication for one rank alone: results have the right shapes, but no values.

In: tensors on the meta device. Out: new tensors on the meta device. The compiler uses it to find what a rank
saves for backward and the peak memory of a step (`compiler/saved.py`, `compiler/peak_memory.py`) without
starting ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from autoptd.ir.mesh import Mesh
from autoptd.runtime.world.world import Channel, Done, Group, Like, Pending, World, equal_parts


class ShapeGroup(Group):
    """The handle of one of `size` ranks, as a rule the first."""

    def __init__(self, size: int, index: int = 0) -> None:
        super().__init__(tuple(range(size)), index)

    def all_reduce(self, x: torch.Tensor, site: str, op: str = "sum") -> torch.Tensor:
        return torch.empty_like(x)

    def all_reduce_(self, x: torch.Tensor, site: str) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor, dim: int, site: str) -> torch.Tensor:
        return x.new_empty((*x.shape[:dim], x.shape[dim] * self.size, *x.shape[dim + 1 :]))

    def reduce_scatter(self, x: torch.Tensor, dim: int, site: str) -> torch.Tensor:
        length = equal_parts(x, dim, self.size, site)
        return x.new_empty((*x.shape[:dim], length, *x.shape[dim + 1 :]))

    def all_to_all(
        self, parts: Sequence[torch.Tensor], site: str, sizes: Sequence[int] | None = None
    ) -> list[torch.Tensor]:
        if sizes is not None:
            return [parts[0].new_empty(size) for size in sizes]
        return [torch.empty_like(parts[self.index], memory_format=torch.contiguous_format) for _ in parts]

    def broadcast(self, x: torch.Tensor, source_index: int, site: str) -> torch.Tensor:
        return torch.empty_like(x)

    def all_reduce_start(self, flat: torch.Tensor, site: str) -> Pending:
        return Done(flat)

    def all_gather_start(self, x: torch.Tensor, dim: int, site: str) -> Pending:
        return Done(self.all_gather(x, dim, site))

    def all_gather_start_(self, flat: torch.Tensor, site: str) -> Pending:
        return Done(flat)

    def reduce_scatter_start(
        self, x: torch.Tensor, dim: int, site: str, sum_dtype: torch.dtype | None = None
    ) -> Pending:
        part = self.reduce_scatter(x, dim, site)
        return Done(part if sum_dtype is None else part.to(sum_dtype))

    def gather_objects(self, obj: Any, site: str) -> list[Any]:
        return [obj] * self.size


class ShapeChannel(Channel):
    """Both ends of a channel: drops the tensors sent, and returns meta tensors for those received."""

    def send(self, tensors: Sequence[torch.Tensor], site: str) -> Pending:
        return Done()

    def receive(self, like: Sequence[Like], site: str) -> Pending:
        return Done([torch.empty(tuple(shape), dtype=dtype, device="meta") for shape, dtype in like])


class ShapeWorld(World):
    """The world of one rank on the meta device; it has whatever groups and channels are asked for."""

    def __init__(self, rank: int, mesh: Mesh) -> None:
        super().__init__(rank, mesh, torch.device("meta"), timeout=0.0)

    def outgoing(self, peer_rank: int) -> Channel:
        return ShapeChannel()

    def incoming(self, peer_rank: int) -> Channel:
        return ShapeChannel()

    def report_fault(self, exc: BaseException) -> None:
        pass

    def raise_first_fault(self) -> None:
        pass

    def _group_of(self, ranks: tuple[int, ...]) -> Group:
        return self._solo if len(ranks) == 1 else ShapeGroup(len(ranks), ranks.index(self.rank))
