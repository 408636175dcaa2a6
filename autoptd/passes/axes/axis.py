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

    `segments` are consecutive pieces of unequal sizes (q|k|v), each a list of factors.
    """

    __slots__ = ("parent", "parts", "segments", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.parent: Axis | None = None
        self.parts: list[Axis] | None = None
        self.segments: list[list[Axis]] | None = None


def resolve(axis: Axis) -> Axis:
    """Return the axis that `axis` was merged into."""
    # Halve the path on the way: along a residual stream it would grow with every layer.
    while axis.parent is not None:
        if axis.parent.parent is not None:
            axis.parent = axis.parent.parent
        axis = axis.parent
    return axis


def atoms(axes: Sequence[Axis]) -> list[Axis]:
    """Return the unsplit factors of a list of axes, in order, with those of size 1."""
    factors: list[Axis] = []
    for axis in axes:
        axis = resolve(axis)
        factors += atoms(axis.parts) if axis.parts else [axis]
    return factors


def proper_atoms(axes: Sequence[Axis]) -> list[Axis]:
    """Return the unsplit factors of a list of axes, in order, without those of size 1."""
    return [axis for axis in atoms(axes) if axis.size != 1]


def _size(axes: Sequence[Axis]) -> int:
    return math.prod(axis.size for axis in axes)


def unify(left: Sequence[Axis], right: Sequence[Axis]) -> None:
    """Make two factorisations of the same size agree, as far as they can.

    Factors are compared from the major end. Equal ones are merged; of unequal ones the larger is split, if the smaller
    divides it. Where they are incompatible the rest is left alone: the operator's letters will disagree there, and it runs
    whole.
    """
    ours, theirs = proper_atoms(left), proper_atoms(right)
    while ours and theirs:
        mine, other = atoms([ours.pop(0)]), atoms([theirs.pop(0)])
        # One of them was split by an earlier step: begin again with its factors.
        if len(mine) > 1 or len(other) > 1:
            ours, theirs = mine + ours, other + theirs
            continue
        a, b = mine[0], other[0]
        if a is b:
            continue
        if a.size == b.size:
            _merge(a, b)
        elif a.segments or b.segments:
            # A sum of segments has no factors.
            return
        elif a.size % b.size == 0:
            major, minor = _split(a, b.size)
            b.parent = major
            ours.insert(0, minor)
        elif b.size % a.size == 0:
            major, minor = _split(b, a.size)
            a.parent = major
            theirs.insert(0, minor)
        else:
            return


def _split(axis: Axis, major: int) -> tuple[Axis, Axis]:
    axis.parts = [Axis(major), Axis(axis.size // major)]
    return axis.parts[0], axis.parts[1]


def _merge(axis: Axis, other: Axis) -> None:
    """Make two unsplit axes of one size the same, if their segments agree."""
    if axis.segments and other.segments:
        if list(map(_size, axis.segments)) != list(map(_size, other.segments)):
            return
        for ours, theirs in zip(axis.segments, other.segments, strict=True):
            unify(ours, theirs)
    # The first to know of segments tells: a bias learns from its weight that it is q|k|v.
    axis.segments = axis.segments or other.segments
    other.parent = axis


def find_segment(axis: Axis, start: int, length: int) -> list[Axis] | None:
    """Cut `axis` into segments so that a range is one, and return its factors; None where factors are in the way."""
    whole = atoms([axis])
    if len(whole) != 1:
        return None
    axis = whole[0]
    segments = axis.segments if axis.segments is not None else [[Axis(axis.size)]]
    end, first = start + length, 0
    for i, segment in enumerate(segments):
        behind = first + _size(segment)
        if first <= start and end <= behind:
            if behind - first > length:
                # Only a segment that nothing has split or merged yet can be cut.
                only = segment[0]
                if len(segment) != 1 or only.parts or only.parent is not None or only.segments:
                    return None
                cuts = [size for size in (start - first, length, behind - end) if size]
                segments = [*segments[:i], *([Axis(size)] for size in cuts), *segments[i + 1 :]]
                i += start > first
            axis.segments = segments
            return segments[i]
        first = behind
    return None


def unit(axis: Axis) -> int:
    """Return the size that the number of ranks must divide; of segments, what all their first factors have in common."""
    if not axis.segments:
        return axis.size
    common = 0
    for segment in axis.segments:
        factors = proper_atoms(segment)
        common = math.gcd(common, unit(factors[0]) if factors else 1)
    return common


def blocks(axis: Axis) -> tuple[int, ...]:
    """Return the sizes of the blocks, in order; every rank has a chunk of each."""
    if not axis.segments:
        return (axis.size,)
    sizes: list[int] = []
    for segment in axis.segments:
        first, *rest = proper_atoms(segment) or [Axis(1)]
        sizes += [block * _size(rest) for block in blocks(first)]
    return tuple(sizes)


def is_useful(axis: Axis) -> bool:
    """Tell whether there are segments that more than one rank can share."""
    return bool(axis.segments) and unit(axis) > 1


__all__ = ["Axis", "atoms", "blocks", "find_segment", "is_useful", "proper_atoms", "resolve", "unify", "unit"]
