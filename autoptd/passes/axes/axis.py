"""The factors of tensor dims, and how they are made to agree: `Axis`, `unify`.

An axis is a product of factors (a view splits it), or a sum of *segments* of unequal sizes (slices cut it: the q, k and v of
grouped queries that one weight makes). Segments are split together, each along its first factor: a shard is a chunk of each.

    x = Axis(128);  q = find_segment(x, 0, 64);  k = find_segment(x, 64, 32)
    unify(q, [Axis(4), Axis(2), Axis(8)])     # heads x repeat x head_dim
    blocks(x)                                 # (64, 32, 32): a shard has a chunk of each
"""

from __future__ import annotations

import math
from collections.abc import Sequence


class Axis:
    """A factor of a dim. `parent` leads to the axis it was merged into, `parts` are its factors, major first.

    `segments` are pieces of unequal sizes that lie one behind the other (q|k|v), each a list of factors.
    """

    __slots__ = ("parent", "parts", "segments", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.parent: Axis | None = None
        self.parts: list[Axis] | None = None
        self.segments: list[list[Axis]] | None = None


def resolve(axis: Axis) -> Axis:
    """The axis that `axis` was merged into; paths are halved on the way, or those along a residual stream would grow."""
    while axis.parent is not None:
        if axis.parent.parent is not None:
            axis.parent = axis.parent.parent
        axis = axis.parent
    return axis


def atoms(axes: Sequence[Axis]) -> list[Axis]:
    """The unsplit factors of a list of axes, in order."""
    found: list[Axis] = []
    for axis in axes:
        axis = resolve(axis)
        found += atoms(axis.parts) if axis.parts else [axis]
    return found


def unify(left: Sequence[Axis], right: Sequence[Axis]) -> None:
    """Make two factorisations of the same size agree, as far as they can."""
    a = [axis for axis in atoms(left) if axis.size != 1]
    b = [axis for axis in atoms(right) if axis.size != 1]
    while a and b:
        x, y = atoms([a.pop(0)]), atoms([b.pop(0)])
        if len(x) > 1 or len(y) > 1:  # split while we were at it
            a, b = x + a, y + b
            continue
        one, other = x[0], y[0]
        if one is other:
            continue
        if one.size == other.size:
            _merge(one, other)
        elif one.segments or other.segments:
            return  # a sum is no product: incompatible
        elif one.size % other.size == 0:
            major, minor = _split(one, other.size)
            other.parent = major
            a.insert(0, minor)
        elif other.size % one.size == 0:
            major, minor = _split(other, one.size)
            one.parent = major
            b.insert(0, minor)
        else:
            return  # incompatible: the operator's letters will disagree, and it runs whole there


def _split(axis: Axis, major: int) -> tuple[Axis, Axis]:
    axis.parts = [Axis(major), Axis(axis.size // major)]
    return axis.parts[0], axis.parts[1]


def _merge(one: Axis, other: Axis) -> None:
    """Make two unsplit axes of one size the same, where their segments agree."""
    if one.segments and other.segments:
        sizes = [
            [math.prod(axis.size for axis in piece) for piece in each.segments or ()] for each in (one, other)
        ]
        if sizes[0] != sizes[1]:
            return
        for mine, theirs in zip(one.segments, other.segments, strict=True):
            unify(mine, theirs)
    one.segments = one.segments or other.segments
    other.parent = one


def find_segment(axis: Axis, start: int, length: int) -> list[Axis] | None:
    """The factors of a piece of `axis`, which is cut into segments there; None where factors of it are in the way."""
    whole = atoms([axis])
    if len(whole) != 1:
        return None
    axis = whole[0]
    segments = axis.segments if axis.segments is not None else [[Axis(axis.size)]]
    at = 0
    for i, piece in enumerate(segments):
        size = math.prod(one.size for one in piece)
        if at <= start and start + length <= at + size:
            if size > length:
                if len(piece) != 1 or piece[0].parts or piece[0].parent is not None or piece[0].segments:
                    return None
                cuts = [n for n in (start - at, length, at + size - start - length) if n]
                segments = [*segments[:i], *([Axis(n)] for n in cuts), *segments[i + 1 :]]
                i += start > at
            axis.segments = segments
            return segments[i]
        at += size
    return None


def unit(axis: Axis) -> int:
    """What the number of ranks must divide: the size, or of segments what all their first factors have in common."""
    if not axis.segments:
        return axis.size
    firsts = [[one for one in atoms(piece) if one.size != 1] for piece in axis.segments]
    return math.gcd(*(unit(piece[0]) if piece else 1 for piece in firsts))


def blocks(axis: Axis) -> tuple[int, ...]:
    """Sizes of the blocks, in order, of which every rank has a chunk each."""
    if not axis.segments:
        return (axis.size,)
    found: list[int] = []
    for piece in axis.segments:
        first, *rest = [one for one in atoms(piece) if one.size != 1] or [Axis(1)]
        found += [block * math.prod(one.size for one in rest) for block in blocks(first)]
    return tuple(found)


def is_useful(axis: Axis) -> bool:
    """Whether there are segments that some number of ranks divides."""
    return bool(axis.segments) and unit(axis) > 1


__all__ = ["Axis", "atoms", "blocks", "find_segment", "is_useful", "resolve", "unify", "unit"]
