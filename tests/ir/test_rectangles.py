"""Rectangles of what ranks hold: against the tensor functions that cut and join shards, for random shapes and meshes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autoptd.errors import InternalError
from autoptd.ir.rectangles import Item, Range, Rectangle, own_runs, pieces, rectangles_of_flat, share, whole
from autoptd.ir.types import Outer
from autoptd.runtime.ops.shards import take_shard


def put(into: torch.Tensor, part: Rectangle, stored: torch.Tensor) -> None:
    """Add what a rank stores of a rectangle to a full tensor, counting how often each element comes."""
    block = stored.reshape(-1)[part.start : part.start + math.prod(part.block)].view(part.block)
    for dim, (at, size) in enumerate(zip(part.at, part.sizes, strict=True)):
        block = block.narrow(dim, at, size)
        into = into.narrow(dim, part.offsets[dim], size)
    into += block


@st.composite
def cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], int, Outer, int, bool]:
    """(shape, dim, blocks, degree, is padded) of a parameter that ranks cut."""
    degree = draw(st.sampled_from([1, 2, 3, 4]))
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    dim = draw(st.integers(0, len(shape) - 1))
    kind = draw(st.sampled_from(["equal", "unequal", "padded"]))
    if kind == "padded":
        shape[dim] = draw(st.integers(1, 13))
        return tuple(shape), dim, 1, degree, bool(shape[dim] % degree)
    lengths = [degree * draw(st.integers(1, 3)) for _ in range(draw(st.integers(1, 3)))]
    if kind == "equal":
        lengths = lengths[:1] * len(lengths)
    shape[dim] = sum(lengths)
    return tuple(shape), dim, len(lengths) if kind == "equal" else tuple(lengths), degree, False


@given(cuts(), st.integers(1, 4), st.data())
@settings(max_examples=300, deadline=None)
def test_every_element_is_held_once(
    cut: tuple[tuple[int, ...], int, Outer, int, bool], d: int, data: st.DataObject
) -> None:
    """Shards of shards: over tensor ranks, and of each shard a flat range over replicas, padding left out."""
    shape, dim, blocks, degree, is_padded = cut
    full = torch.arange(1, math.prod(shape) + 1).view(shape)
    found = torch.zeros_like(full)
    for index in range(degree):
        local = take_shard(full, dim, blocks, index, degree, shape[dim] if is_padded else 0)
        runs = own_runs(shape[dim], blocks, index, degree, is_padded)
        ends = sorted(data.draw(st.integers(0, local.numel())) for _ in range(d - 1))
        for start, end in zip([0, *ends], [*ends, local.numel()], strict=True):
            flat = Range(start, end) if d > 1 else None
            stored = local.reshape(-1)[start:end] if d > 1 else local
            for part in pieces(shape, dim, runs, local.shape[dim], flat):
                assert part.numel > 0
                put(found, part, stored)
    assert torch.equal(found, full)


@given(st.lists(st.integers(1, 5), max_size=4), st.data())
@settings(max_examples=200, deadline=None)
def test_a_flat_range_is_few_rectangles(shape: list[int], data: st.DataObject) -> None:
    numel = math.prod(shape)
    start = data.draw(st.integers(0, numel))
    end = data.draw(st.integers(start, numel))
    found = list(rectangles_of_flat(tuple(shape), Range(start, end)))
    assert len(found) <= max(1, 2 * len(shape) - 1)
    full, seen = torch.arange(1, numel + 1).view(shape), torch.zeros(shape, dtype=torch.long)
    for part in found:
        put(seen, part, full.reshape(-1)[start:end])
    expected = torch.where((full > start) & (full <= end), full, 0)
    assert torch.equal(seen, expected)


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 6)), min_size=1, max_size=12),
    st.lists(st.integers(0, 50), min_size=1, max_size=5),
)
@settings(max_examples=200, deadline=None)
def test_shares_are_level(shapes: list[tuple[int, int]], before: list[int]) -> None:
    """All that is there is shared once, and nobody has more than a row above the level, who had less before."""
    items = [Item(str(k), "", *whole(shape), 4) for k, shape in enumerate(shapes)]
    loads = dict(enumerate(4 * load for load in before))
    shares = share(items, loads, range(len(before)))
    for k, shape in enumerate(shapes):
        seen = torch.zeros(shape, dtype=torch.long)
        for some in shares.values():
            for item in some:
                if item.name == str(k):
                    put(seen, item.rectangle, torch.ones(shape, dtype=torch.long))
        assert torch.equal(seen, torch.ones_like(seen))
    assert sum(loads.values()) == 4 * sum(before) + sum(item.nbytes for item in items)
    # The height of water that is poured over what they had.
    ascending = sorted(4 * load for load in before)
    poured = sum(item.nbytes for item in items)
    heights = [(sum(ascending[:n]) + poured) / n for n in range(1, len(before) + 1)]
    level = min(heights)
    row = 4 * max(width for _, width in shapes)
    for rank, load in loads.items():
        assert load <= max(level, 4 * before[rank]) + 1.5 * row


def test_blocks_that_do_not_divide_are_our_defect() -> None:
    with pytest.raises(InternalError, match="divide into 4 shards"):
        own_runs(6, 1, 0, 4)
