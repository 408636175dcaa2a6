"""The conversions from one layout to another, each over one axis or sub-axis.

In: the types of a value over one mesh axis and its sub-axes, before and after. Out: `Step`s, rows of the
table of conversions (`types.py`); None if no rows lead there.

    keys = Layout({"tp:(1)2": S(1, 0), "tp:(2)2": R})
    steps("tp", Layout({"tp": P}), keys, Mesh(t=4))     # P -> S over tp:(1)2, then P -> R over tp:(2)2
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from autoptd.ir.layout import Layout
from autoptd.ir.mesh import Mesh
from autoptd.ir.types import CONVERSIONS, Dims, E, Outer, P, ValueType


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
    """Return the conversions over a mesh axis from `source` to `target`: [] if they are equal, None if there
    is no way.

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


__all__ = ["Step", "shard_places", "steps"]
