"""The memory of a rank's values, and the values that each operator saves for its backward; see
`autoptd/compiler/saved.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch.fx import Node


@dataclass(frozen=True)
class Storage:
    """Memory that an operator allocates: its result number `piece`, or, with -1 and below, internal memory."""

    node: Node
    piece: int
    nbytes: int

    @property
    def is_private(self) -> bool:
        return self.piece < 0


class Value(NamedTuple):
    """A tensor of a rank: a view of a storage."""

    storage: Storage
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    requires_grad: bool


@dataclass
class SavedForBackward:
    """The tensors of every node, and the storages that its operator saves."""

    values: dict[Node, tuple[Value, ...]] = field(default_factory=dict)
    of: dict[Node, frozenset[Storage]] = field(default_factory=dict)

    def storage(self, node: Node) -> Storage:
        return self.values[node][0].storage


__all__ = ["SavedForBackward", "Storage", "Value"]
