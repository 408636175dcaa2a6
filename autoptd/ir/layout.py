"""Where the parts of a value lie on the ranks: one value type per axis.

In: the types over the axes that divide the value, by the axis' name; over every other axis it is `I`. The axes are those of the
mesh, and `BATCH`: all microbatches of all replicas, over which values are typed as over an axis of ranks.

    layout = Layout({"tp": S(2, 0), BATCH: S(0, 0)})
    layout["tp"], layout["pp"], layout.batch        # S(2, 0), I, S(0, 0)
    layout.local_shape(dims, Mesh(t=4))             # of one tensor rank, with all rows of the batch
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autoptd.errors import InternalError
from autoptd.ir.mesh import Mesh
from autoptd.ir.types import Dims, I, ValueType, shard_size, type_text

BATCH = "batch"


@dataclass(frozen=True, init=False)
class Layout:
    """One value type per axis; an axis that is not named has `I`. Layouts with equal types are equal."""

    types: tuple[tuple[str, ValueType], ...]

    def __init__(self, types: Mapping[str, ValueType] | None = None) -> None:
        named = sorted((axis, kind) for axis, kind in (types or {}).items() if kind != I)
        object.__setattr__(self, "types", tuple(named))

    def __getitem__(self, axis: str) -> ValueType:
        return next((kind for name, kind in self.types if name == axis), I)

    def __str__(self) -> str:
        return ", ".join(f"{axis}: {kind}" for axis, kind in self.types) or "I"

    def having(self, axis: str, kind: ValueType) -> Layout:
        """This layout, with another type over one axis."""
        return Layout({**dict(self.types), axis: kind})

    @property
    def batch(self) -> ValueType:
        """The type over microbatches and replicas."""
        return self[BATCH]

    @property
    def over_mesh(self) -> tuple[tuple[str, ValueType], ...]:
        """The axes of the mesh over which the type is not `I`, with the types."""
        return tuple((axis, kind) for axis, kind in self.types if axis != BATCH)

    @property
    def shards(self) -> tuple[tuple[str, ValueType], ...]:
        """The axes of the mesh that cut the value into shards, with the types."""
        return tuple((axis, kind) for axis, kind in self.over_mesh if kind.kind == "S")

    @property
    def shard(self) -> tuple[str, ValueType] | None:
        """The axis that cuts the value into shards, with the type; InternalError where several do."""
        if len(self.shards) > 1:
            raise InternalError(str(self), "two axes cut one value, where only one is provided for")
        return self.shards[0] if self.shards else None

    @property
    def sharded_dims(self) -> frozenset[int]:
        """The dims that an axis of the mesh cuts."""
        return frozenset(dim for _, kind in self.shards for dim, _ in kind.places)

    def pieces(self, mesh: Mesh) -> int:
        """Into how many different pieces the ranks of a mesh cut the value."""
        return math.prod(kind.pieces(mesh.degree(axis)) for axis, kind in self.shards)

    def cuts(self, mesh: Mesh) -> Iterator[tuple[int, int, int]]:
        """(dim, atom, pieces) of everything that the ranks of a mesh cut."""
        for axis, kind in self.shards:
            for (dim, atom), pieces in kind.cuts(mesh.degree(axis)).items():
                yield dim, atom, pieces

    def local_shape(self, dims: Dims, mesh: Mesh) -> tuple[int, ...]:
        """Shape of one rank's part of a value with these dims."""
        sizes = [list(atoms) for atoms in dims]
        for dim, atom, pieces in self.cuts(mesh):
            sizes[dim][atom] = shard_size(sizes[dim][atom], pieces)
        return tuple(map(math.prod, sizes))

    def text(self, dims: Dims) -> str:
        """Text for people: `I`, or the types over all axes of the mesh, with the atoms that are cut in brackets."""
        return ", ".join(type_text(kind, dims, axis) for axis, kind in self.over_mesh) or "I"
