"""How a value is laid out over the ranks: one value type per axis; and the conversions from one layout to another.

In: types by the name of their axis; an axis that is left out has `I`. Axes are those of the mesh, their sub-axes
(`mesh.py`), and `BATCH`: all microbatches of all replicas, over which values have types as over an axis of ranks.
Out: types, local shapes, and the positions of shards.

    layout = Layout({"tp": S(2, 0), BATCH: S(0, 0)})
    layout["tp"], layout["pp"], layout.batch        # S(2, 0), I, S(0, 0)
    layout.local_shape(dims, Mesh(t=4))             # of one tensor rank, with all rows of the batch

With 2 KV heads, 4 query heads for each and t = 4, no atom of 2 x 4 divides over the ranks, but two sub-axes of them
do:

    queries = Layout({"tp:(1)2": S(2, 0), "tp:(2)2": S(2, 1)})      # every rank has 2 of the 8 heads
    keys = Layout({"tp:(1)2": S(2, 0), "tp:(2)2": R})               # and the KV head that they attend to

`steps` converts a value over one mesh axis, by rows of the table of conversions (`types.py`):

    steps("tp", Layout({"tp": P}), keys, Mesh(t=4))     # P -> S over tp:(1)2, then P -> R over tp:(2)2
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from autoptd.errors import InternalError
from autoptd.ir.mesh import AXES, Mesh, Role, SubAxis, base, covers, is_sub_axis, parse_sub_axis, role_of
from autoptd.ir.types import (
    CONVERSIONS,
    Dims,
    E,
    I,
    Outer,
    P,
    Segmented,
    ValueType,
    outer_size,
    padded_size,
    shard_size,
    type_text,
)

# Not an axis of the mesh: its "ranks" are the microbatches of all replicas.
BATCH = "batch"


@dataclass(frozen=True, init=False)
class Layout:
    """One value type per axis; an axis that is not named has `I`. Layouts with equal types are equal.

    `types` are sorted: sub-axes of one axis slowest first.
    """

    types: tuple[tuple[str, ValueType], ...]

    def __init__(self, types: Mapping[str, ValueType] | None = None) -> None:
        # Without the I's, equal layouts are equal tuples.
        named = [(axis, kind) for axis, kind in (types or {}).items() if kind != I]
        object.__setattr__(self, "types", tuple(sorted(named, key=_place)))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[type[Layout], tuple[dict[str, ValueType]]]:
        # Without cached values: hashes of strings differ between processes.
        return Layout, (dict(self.types),)

    @cached_property
    def _hash(self) -> int:
        return hash(self.types)

    def __getitem__(self, axis: str) -> ValueType:
        for name, kind in self.types:
            # A type over an axis is also the type over each of its sub-axes, but not the other way around.
            if covers(name, axis):
                return kind
            if covers(axis, name):
                raise InternalError(f"{self}", f"has no type over all of {axis}")
        return I

    def __str__(self) -> str:
        return ", ".join(f"{axis}: {kind}" for axis, kind in self.types) or "I"

    def having(self, axis: str, kind: ValueType) -> Layout:
        """Return this layout with another type over one axis."""
        return self.replacing(axis, Layout({axis: kind}))

    def replacing(self, axis: str, types: Layout) -> Layout:
        """Return this layout with the types of `types` over one axis and its sub-axes."""
        return Layout({name: kind for name, kind in self.types if base(name) != axis} | dict(types.types))

    def over(self, axis: str) -> Layout:
        """Return only the types over one axis and its sub-axes."""
        return Layout({name: kind for name, kind in self.types if base(name) == axis})

    @property
    def batch(self) -> ValueType:
        """The type over microbatches and replicas."""
        return self[BATCH]

    @cached_property
    def over_mesh(self) -> tuple[tuple[str, ValueType], ...]:
        """The axes of the mesh over which the type is not `I`, with the types."""
        return tuple((axis, kind) for axis, kind in self.types if axis != BATCH)

    @cached_property
    def sub_axes(self) -> tuple[str, ...]:
        """The sub-axes over which it has types."""
        return tuple(axis for axis, _ in self.types if is_sub_axis(axis))

    @cached_property
    def shards(self) -> tuple[tuple[str, ValueType], ...]:
        """The axes of the mesh that cut the value into shards, with the types."""
        return tuple((axis, kind) for axis, kind in self.over_mesh if kind.kind == "S")

    @cached_property
    def cut_places(self) -> frozenset[tuple[int, int]]:
        """The atoms that axes of the mesh cut: (dim, index in the dim)."""
        return frozenset((kind.dim, kind.atom) for _, kind in self.shards)

    @property
    def is_whole(self) -> bool:
        """Whether every rank of the mesh has all of the value."""
        return all(kind.is_whole for _, kind in self.over_mesh)

    @property
    def letter(self) -> str:
        """The letter of its type over all axes of the mesh: S if one shards the value, else P, R or I."""
        letters = {kind.kind for _, kind in self.over_mesh}
        # As with shards, neither the value nor its cotangent is equal on all ranks.
        if letters >= {"P", "R"} or E.kind in letters:
            return "S"
        return next((letter for letter in "SPR" if letter in letters), I.kind)

    @property
    def sharded_dims(self) -> frozenset[int]:
        """The dims that axes of the mesh cut."""
        return frozenset(kind.dim for _, kind in self.shards)

    def is_chunk(self, dims: Dims) -> bool:
        """Tell whether consecutive ranks have consecutive chunks of the value, or of each of its blocks.

        Sub-axes that cut adjacent atoms together act like their axis on the product of these atoms.
        """
        if len(self.shards) < 2:
            return True
        # All atoms of the value, in the order of its elements.
        order = [(dim, atom) for dim, atoms in enumerate(dims) for atom in range(len(atoms))]
        places = [order.index((kind.dim, kind.atom)) for _, kind in self.shards]
        factors = [parse_sub_axis(axis) for axis, _ in self.shards]
        for slow, fast in pairwise(factors):
            if slow.axis != fast.axis or slow.end != fast.before:
                return False
        return all(second == first + 1 for first, second in pairwise(places))

    def chunk_axis(self, dims: Dims, mesh: Mesh) -> str | None:
        """Return the axis along which the chunks of the value lie, or None if it is not cut.

        InternalError if the shards are not chunks along one axis.
        """
        if not self.is_chunk(dims):
            raise InternalError(str(self), "consecutive ranks do not have consecutive chunks")
        axes = [axis for axis, _ in self.shards]
        if len(axes) < 2:
            return axes[0] if axes else None
        # Adjacent sub-axes form one larger sub-axis, or the axis itself.
        first, last = parse_sub_axis(axes[0]), parse_sub_axis(axes[-1])
        whole = SubAxis(first.axis, first.before, last.end // first.before)
        return whole.axis if whole.size == mesh.degree(whole.axis) else str(whole)

    def element_layout(self, dims: Dims, mesh: Mesh) -> tuple[object, ...]:
        """Return the elements of each rank as a value that compares equal for any choice of atoms; () if
        every rank has all of them.
        """
        # One rank along the axis has all of it, whatever the type.
        axis = self.chunk_axis(dims, mesh)
        if axis is None or mesh.degree(axis) == 1:
            return ()
        kind = self.shards[0][1]
        return (
            kind.dim,
            outer_size(dims, kind),
            axis,
            self.local_shape(dims, mesh),
            self.padded_size(dims, mesh),
        )

    def padded_size(self, dims: Dims, mesh: Mesh) -> int:
        """Return the size of the dim that is padded to make equal shards; 0 if all axes divide it."""
        return max((padded_size(dims, kind, mesh.degree(axis)) for axis, kind in self.shards), default=0)

    def pieces(self, mesh: Mesh) -> int:
        """Count the distinct pieces into which a mesh cuts the value; pieces by expert are equal on average."""
        return math.prod(mesh.degree(axis) for axis, kind in self.over_mesh if kind.kind in "SE")

    def cuts(self, mesh: Mesh) -> Iterator[tuple[int, int, int]]:
        """Yield (dim, atom, pieces) for everything that the mesh cuts."""
        for axis, kind in self.shards:
            if mesh.degree(axis) > 1:
                yield kind.dim, kind.atom, mesh.degree(axis)

    def local_dims(self, dims: Dims, mesh: Mesh) -> Dims:
        """Return the atoms of one rank's part of a value with these dims."""
        sizes = [list(atoms) for atoms in dims]
        for dim, atom, pieces in self.cuts(mesh):
            sizes[dim][atom] = _shard(sizes[dim][atom], pieces)
        return tuple(map(tuple, sizes))

    def local_shape(self, dims: Dims, mesh: Mesh) -> tuple[int, ...]:
        """Return the shape of one rank's part of a value with these dims."""
        return tuple(map(math.prod, self.local_dims(dims, mesh)))

    def blocks(self, dims: Dims, axis: str, mesh: Mesh) -> Outer:
        """Return the number of blocks, or the sizes of the blocks, that the shards over `axis` form in the
        part that the other axes leave.
        """
        others = Layout({name: kind for name, kind in self.types if name not in (axis, BATCH)})
        return outer_size(others.local_dims(dims, mesh), self[axis])

    def text(self, dims: Dims) -> str:
        """Format the layout for people: `I`, or the types over all axes of the mesh, with the sharded atoms
        in brackets.
        """
        texts, axes = [], {base(axis) for axis, _ in self.over_mesh}
        for axis, kind in self.over_mesh:
            # An S names its axis; other types do so only over a sub-axis, or if there are several axes.
            is_named = kind.kind == "S" or (len(axes) == 1 and not is_sub_axis(axis))
            texts.append(type_text(kind, dims, axis) if is_named else f"{kind}({axis})")
        return ", ".join(texts) or "I"


def typed_over(axis: str) -> str:
    """Return the name under which a layout has the types over a mesh axis or sub-axis; for replicas, `BATCH`."""
    return BATCH if base(axis) in AXES and role_of(axis) is Role.BATCH else axis


def loss_over(axis: str) -> Layout:
    """Return the type of the loss over a mesh axis: whole, but a partial sum if ranks have other tokens or
    samples.
    """
    return Layout({axis: P} if role_of(axis) is Role.TOKENS else {})


def copy_axes(layout: Layout, mesh: Mesh) -> list[str]:
    """Return the axes and sub-axes along which ranks that divide values hold the same part of a value."""
    axes = []
    for axis in mesh.value_axes:
        parts = mesh.parts(axis, layout.over(axis).sub_axes)
        axes += [part for part in parts if layout[part].is_whole]
    return axes


def _shard(size: int, pieces: int) -> int:
    """Return the size of a shard of an atom; of an atom with several segments, a shard has a chunk of each."""
    if isinstance(size, Segmented):
        return Segmented([block // pieces for block in size.blocks])
    return shard_size(size, pieces)


def _place(entry: tuple[str, ValueType]) -> tuple[str, int]:
    """Return the sort key of a type: sub-axes of one axis slowest first."""
    axis, _ = entry
    return base(axis), parse_sub_axis(axis).before if is_sub_axis(axis) else 0


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


class Step(NamedTuple):
    """One conversion over `axis`; `layout` has the types over the whole mesh axis after it.

    The other axes cut the value into `others` pieces; a group of ranks converts one of these.
    """

    axis: str
    before: ValueType
    after: ValueType
    layout: Layout
    others: int


def steps(axis: str, source: Layout, target: Layout, mesh: Mesh) -> list[Step] | None:
    """Return the conversions over a mesh axis from `source` to `target`: [] if they are equal, None if no
    rows lead there.

    Cuts come first, slow sub-axes before fast ones; gathers come last, fast ones first: the collectives in
    between move less.
    """
    if source == target:
        return []
    if source == Layout({axis: E}):
        # Rows of the ranks' own experts: put among zeros, they add up to all rows.
        pending = Layout({axis: P})
        onward = steps(axis, pending, target, mesh)
        return None if onward is None else [Step(axis, E, P, pending, 1), *onward]
    parts = mesh.parts(axis, (*source.sub_axes, *target.sub_axes))
    # Shards over an axis are not the shards that its sub-axes make one by one.
    if not all(name in parts for layout in (source, target) for name, _ in layout.shards):
        return None
    # The types on the way: those of the source, which become the target's one by one.
    types = {part: source[part] for part in parts}
    found = []
    for part in _in_order(parts, source, target):
        before, types[part] = types[part], target[part]
        if (before.kind, types[part].kind) not in CONVERSIONS:
            return None
        others = 1
        for name, kind in types.items():
            if name != part and kind.kind == "S":
                others *= mesh.degree(name)
        is_there = all(types[name] == target[name] for name in parts)
        # Named by the mesh axis if the target is: types over its sub-axes would be another layout.
        layout = target if is_there else Layout(types)
        found.append(Step(part, before, types[part], layout, others))
    return found


def _in_order(parts: tuple[str, ...], source: Layout, target: Layout) -> list[str]:
    """Return the parts whose types change: cuts, slow parts first; then gathers, fast ones first."""
    cutting: list[str] = []
    gathering: list[str] = []
    for part in parts:
        if source[part] == target[part]:
            continue
        if source[part].kind == "S":
            gathering.insert(0, part)
        else:
            cutting.append(part)
    return cutting + gathering


def shard_places(dims: Dims, axis: str, layouts: Iterable[Layout], mesh: Mesh) -> tuple[Outer, ...]:
    """Return the positions of the shards over an axis in values of these layouts: dim and blocks of each cut."""
    places: list[Outer] = []
    for layout in layouts:
        if layout[axis].kind == "S":
            places += [layout[axis].dim, layout.blocks(dims, axis, mesh)]
    return tuple(places)
