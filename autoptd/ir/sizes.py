"""The size of a value on one rank, in one microbatch.

In: a node of an ANNOTATED graph, and the `Sizes` that its local shape depends on. Out: shapes.

    local_shape(node, Sizes(Mesh(t=2), traced_rows=2, rows=1, pieces=8))
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from autoptd.ir.mesh import Mesh
from autoptd.ir.notes import note, value
from autoptd.ir.types import shard_size


@dataclass(frozen=True)
class Sizes:
    """The inputs of local shapes: the ranks of `mesh`, and the division of a step's rows.

    The trace has `traced_rows`; a microbatch has `rows`, and a step `pieces` microbatches over all replicas.
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
    fake, layout = value(node), note(node).layout
    # Several atoms of one dim may be cut, each by another axis.
    cuts: dict[int, int] = {}
    for dim, _, pieces in layout.cuts(sizes.mesh):
        cuts[dim] = cuts.get(dim, 1) * pieces
    batch = layout.batch
    shapes = []
    for piece in fake if isinstance(fake, (tuple, list)) else [fake]:
        local = list(map(int, piece.shape))
        dims = range(len(local))
        # [2 * s, h] in a trace of 2 rows is [s, h] for one row, whatever else is folded into the dim.
        if batch.kind == "S" and batch.dim in dims:
            local[batch.dim] //= sizes.rows_divisor
        for dim, pieces in cuts.items():
            if dim in dims:
                local[dim] = shard_size(local[dim], pieces)
        shapes.append(tuple(local))
    return shapes


def local_shape(node: Node, sizes: Sizes) -> tuple[int, ...]:
    """Return the local shape of a node's (first) value."""
    return local_shapes(node, sizes)[0]
