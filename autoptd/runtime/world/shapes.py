"""A group of ranks that are not there: its results have the shapes of a real group's, and no numbers.

In: tensors on the meta device. Out: tensors on it, in new memory. What a rank would save is found with it, and no world
is started.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from autoptd.runtime.world.world import Done, Group, Pending, equal_parts


class ShapeGroup(Group):
    """The handle of the first of `size` ranks."""

    def __init__(self, size: int) -> None:
        super().__init__(tuple(range(size)), 0)

    def all_reduce(self, x: torch.Tensor, site: str, op: str = "sum") -> torch.Tensor:
        return torch.empty_like(x)

    def all_reduce_(self, x: torch.Tensor, site: str) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor, dim: int, site: str) -> torch.Tensor:
        return x.new_empty((*x.shape[:dim], x.shape[dim] * self.size, *x.shape[dim + 1 :]))

    def reduce_scatter(self, x: torch.Tensor, dim: int, site: str) -> torch.Tensor:
        length = equal_parts(x, dim, self.size, site)
        return x.new_empty((*x.shape[:dim], length, *x.shape[dim + 1 :]))

    def all_to_all(self, parts: Sequence[torch.Tensor], site: str) -> list[torch.Tensor]:
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
