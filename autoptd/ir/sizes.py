"""How large a value is on one rank, in one microbatch.

In: a node of an ANNOTATED graph, and the `Sizes` that its local shape depends on. Out: shapes.

    local_shape(node, Sizes(Mesh(t=2), traced_rows=2, rows=1, pieces=8))
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch.fx import Node

from autoptd.ir.mesh import Mesh
from autoptd.ir.notes import note, value
from autoptd.ir.types import shard_size


@dataclass(frozen=True)
class Sizes:
    """What a local shape depends on: the ranks of `mesh`, and how a step's rows are divided.

    The trace saw `traced_rows`; a microbatch has `rows`, and a step `pieces` microbatches over all replicas.
    """

    mesh: Mesh
    traced_rows: int
    rows: int
    pieces: int

    @property
    def rows_divisor(self) -> int:
        return self.traced_rows // self.rows

    @property
    def global_rows(self) -> int:
        return self.rows * self.pieces


def local_shapes(node: Node, sizes: Sizes) -> list[tuple[int, ...]]:
    """Return the local shape of each piece of a node's value (one, for a tensor)."""
    fake = value(node)
    shapes = []
    for piece in fake if isinstance(fake, (tuple, list)) else [fake]:
        local = [_local_size(node, dim, int(size), sizes) for dim, size in enumerate(piece.shape)]
        shapes.append(tuple(local))
    return shapes


def local_shape(node: Node, sizes: Sizes) -> tuple[int, ...]:
    """Return the local shape of a node's (first) value."""
    return local_shapes(node, sizes)[0]


def _local_size(node: Node, dim: int, size: int, sizes: Sizes) -> int:
    layout = note(node).layout
    # [2 * s, h] in a trace of 2 rows is [s, h] for one row, whatever else is folded into the dim.
    if layout.batch.kind == "S" and layout.batch.dim == dim:
        size //= sizes.rows_divisor
    # Several atoms of one dim may be cut, each by another axis.
    return shard_size(size, math.prod(pieces for cut, _, pieces in layout.cuts(sizes.mesh) if cut == dim))
