"""The rectangles of a full tensor that a rank holds, and their positions in its storage, as integers.

In: the shape of a full tensor, and how it is cut: into shards along a dim, and possibly into flat ranges of a
shard (ZeRO). Out: rectangles, by their offsets and sizes in the full tensor; padding has none. `share`
divides rectangles that several ranks hold, so that each is written, or read, by one of them.

    runs = own_runs(size=6, blocks=3, index=1, degree=2)         # [Run(1, 0, 1), Run(3, 1, 1), Run(5, 2, 1)]
    [rectangle] = whole((4, 6))
    cut = pieces((6, 5), 0, runs)                                # three rectangles of one row each
    flat = pieces((6, 5), 0, runs, Range(3, 9))                  # their parts in elements 3 to 9 of the shard
    [3, 5]

A rank stores a contiguous tensor. A rectangle is located by offsets `at` in a *block*: the elements of shape
`block` from element `start` on. If a shard is stored whole, the block is the shard; a flat range is cut into
several blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from autoptd.errors import InternalError
from autoptd.ir.types import Outer, Zigzag, shard_size

Sizes = tuple[int, ...]


class Run(NamedTuple):
    """`size` consecutive entries of a dim: from `start` in the full tensor, from `local` in a shard."""

    start: int
    local: int
    size: int


class Range(NamedTuple):
    """Elements `start` to `end` of a tensor, flattened."""

    start: int
    end: int


@dataclass(frozen=True, order=True)
class Rectangle:
    """A part of a full tensor (`offsets`, `sizes`), and its position in a rank's storage."""

    offsets: Sizes
    sizes: Sizes
    start: int
    block: Sizes
    at: Sizes

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    @property
    def cut_dim(self) -> int:
        """The dim along which it is cut into rows: the first one with several entries; -1 for a single
        element.
        """
        return next((dim for dim, size in enumerate(self.sizes) if size > 1), -1)

    def rows(self, begin: int, end: int) -> Rectangle:
        """Return entries `begin` to `end` along `cut_dim`."""
        dim = self.cut_dim
        return replace(
            self,
            offsets=_with(self.offsets, dim, self.offsets[dim] + begin),
            sizes=_with(self.sizes, dim, end - begin),
            at=_with(self.at, dim, self.at[dim] + begin),
        )

    def common(self, offsets: Sizes, sizes: Sizes) -> Rectangle | None:
        """Return its intersection with another rectangle of the full tensor, or None."""
        begin = tuple(map(max, self.offsets, offsets))
        end = tuple(map(min, _plus(self.offsets, self.sizes), _plus(offsets, sizes)))
        if any(stop <= first for first, stop in zip(begin, end, strict=True)):
            return None
        at = _plus(self.at, _minus(begin, self.offsets))
        return replace(self, offsets=begin, sizes=_minus(end, begin), at=at)


def _with(sizes: Sizes, dim: int, size: int) -> Sizes:
    return (*sizes[:dim], size, *sizes[dim + 1 :])


def _plus(one: Sizes, other: Sizes) -> Sizes:
    return tuple(a + b for a, b in zip(one, other, strict=True))


def _minus(one: Sizes, other: Sizes) -> Sizes:
    return tuple(a - b for a, b in zip(one, other, strict=True))


def own_runs(size: int, blocks: Outer, index: int, degree: int, is_padded: bool = False) -> list[Run]:
    """Return the entries of a dim of `size` in shard `index` of `degree`, as `shards.take_shard` takes them."""
    if degree == 1:
        return [Run(0, 0, size)]
    if is_padded:
        width = shard_size(size, degree)
        real = min(max(size - index * width, 0), width)
        return [Run(index * width, 0, real)] if real else []
    if isinstance(blocks, Zigzag):
        raise InternalError(f"a dim of {size}", "is stored in zigzag order, which only token dims can be")
    lengths = [size // blocks] * blocks if isinstance(blocks, int) else blocks
    if sum(lengths) != size or any(length % degree for length in lengths):
        raise InternalError(
            f"a dim of {size}", f"does not consist of {blocks} blocks that divide into {degree} shards"
        )
    runs, start, local = [], 0, 0
    for length in lengths:
        width = length // degree
        runs.append(Run(start + index * width, local, width))
        start, local = start + length, local + width
    return runs


def whole(shape: Sizes) -> list[Rectangle]:
    """Return the only rectangle of an uncut tensor; none if it is empty."""
    zero = (0,) * len(shape)
    return [Rectangle(zero, shape, 0, shape, zero)] if math.prod(shape) else []


def pieces(
    shape: Sizes, dim: int | None, runs: Sequence[Run], local_dim: int = 0, flat: Range | None = None
) -> list[Rectangle]:
    """Return the rectangles that a rank holds of a full tensor of `shape`, whose `dim` is cut (None: it is
    whole).

    Its shard has the entries `runs` of that dim, `local_dim` of them with padding. With `flat`, it stores
    only this range of the shard.
    """
    local = shape if dim is None else _with(shape, dim, local_dim)
    blocks = whole(local) if flat is None else list(rectangles_of_flat(local, flat))
    if dim is None:
        return blocks
    return [part for block in blocks for part in _in_full(block, dim, runs)]


def _in_full(part: Rectangle, dim: int, runs: Sequence[Run]) -> Iterator[Rectangle]:
    """Yield the rectangles of the full tensor in a rectangle of a shard."""
    first, stop = part.offsets[dim], part.offsets[dim] + part.sizes[dim]
    for run in runs:
        begin, end = max(first, run.local), min(stop, run.local + run.size)
        if begin >= end:
            continue
        yield replace(
            part,
            offsets=_with(part.offsets, dim, run.start + begin - run.local),
            sizes=_with(part.sizes, dim, end - begin),
            at=_with(part.at, dim, part.at[dim] + begin - first),
        )


def rectangles_of_flat(shape: Sizes, flat: Range) -> Iterator[Rectangle]:
    """Yield the rectangles that make up a range of a flattened tensor, in order: at most 2n - 1 for n dims.

    Their blocks are counted from the start of the range.
    """
    if not shape and flat.start < flat.end:
        yield Rectangle((), (), 0, (), ())
    begin = flat.start
    while begin < flat.end and shape:
        # The largest part that starts here: entries of a dim whose later dims are complete.
        dim = len(shape) - 1
        width = 1
        while dim > 0 and begin % (width * shape[dim]) == 0 and begin + width * shape[dim] <= flat.end:
            width *= shape[dim]
            dim -= 1
        # Up to the end of this dim, and of the range.
        in_dim = begin // width % shape[dim]
        count = min(shape[dim] - in_dim, (flat.end - begin) // width)
        sizes = (*(1,) * dim, count, *shape[dim + 1 :])
        offsets = _unravel(begin, shape)
        yield Rectangle(offsets, sizes, begin - flat.start, sizes, (0,) * len(shape))
        begin += count * width


def _unravel(index: int, shape: Sizes) -> Sizes:
    """Return the index of an element in a tensor, given its index in the flattened one."""
    places = []
    for size in reversed(shape):
        places.append(index % size)
        index //= size
    return tuple(reversed(places))


class Item(NamedTuple):
    """A rectangle of one tensor, with elements of `itemsize` bytes.

    The tensor is parameter `name` itself, or its optimizer state under `key`.
    """

    name: str
    key: str
    rectangle: Rectangle
    itemsize: int

    @property
    def nbytes(self) -> int:
        return self.rectangle.numel * self.itemsize


def share(items: Iterable[Item], loads: dict[int, int], holders: Sequence[int]) -> dict[int, list[Item]]:
    """Divide the items that all of `holders` hold, so that they write equally many bytes; `loads` are the
    bytes that they already have.

    Each gets a run of the items, in order; if a run ends within an item, the item is cut by rows. Updates
    `loads`.
    """
    shares: dict[int, list[Item]] = {rank: [] for rank in holders}
    waiting = list(reversed(list(items)))
    left = sum(item.nbytes for item in waiting)
    level = _level(sorted(loads[rank] for rank in holders), left)
    due = 0
    for rank in holders:
        # Rows are not cut: the next rank makes up for the difference, and the last one takes the rest.
        due += max(0, level - loads[rank])
        room = min(due, left) if rank != holders[-1] else left
        while waiting and room > 0:
            first, rest = _split(waiting.pop(), room)
            if rest is not None:
                waiting.append(rest)
            if first is None:
                break
            shares[rank].append(first)
            loads[rank] += first.nbytes
            room, left, due = room - first.nbytes, left - first.nbytes, due - first.nbytes
    return shares


def _level(loads: Sequence[int], more: int) -> int:
    """Return the level to which `more` fills up the ascending `loads`, rounded up."""
    for count in range(len(loads), 0, -1):
        # The `count` lowest ones are filled; the others are above the level.
        level = -(-(sum(loads[:count]) + more) // count)
        if level >= loads[count - 1]:
            return level
    return 0


def _split(item: Item, room: int) -> tuple[Item | None, Item | None]:
    """Cut an item by rows after `room` bytes: return the part inside, to the nearest row, and the rest."""
    part = item.rectangle
    if item.nbytes <= room:
        return item, None
    count = part.sizes[part.cut_dim] if part.cut_dim >= 0 else 1
    row = item.nbytes // count
    rows = (room + row // 2) // row
    if rows == 0:
        return None, item
    if rows == count:
        return item, None
    return item._replace(rectangle=part.rows(0, rows)), item._replace(rectangle=part.rows(rows, count))
