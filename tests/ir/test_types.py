"""Sizes of shards: even ones as they are, padded ones of some size in multiples of 64."""

from __future__ import annotations

import numpy as np
import pytest

from autoptd.ir.types import division_text, shard_size
from autoptd.wings.planner.counts import vocab_rows
from autoptd.wings.planner.shape import Shape

SIZES = [  # size, ranks, entries of a shard
    (50257, 1, 50257),
    (50257, 2, 25152),
    (50257, 8, 6336),
    (50257, 64, 786),  # too small to matter
    (50304, 8, 6288),  # divided, not padded: as many as there are
    (51200, 8, 6400),
    (2047, 2, 1024),
    (2049, 2, 1088),
    (61, 4, 16),
]


@pytest.mark.parametrize(("size", "degree", "each"), SIZES)
def test_shards_that_are_padded_anyhow_are_aligned(size: int, degree: int, each: int) -> None:
    assert shard_size(size, degree) == each


def test_the_padding_is_told() -> None:
    assert division_text(50257, 8) == "50257 = 8 x 6336 - 431" and division_text(61, 4) == "61 = 4 x 16 - 3"


@pytest.mark.parametrize("size", [50257, 50304, 61])
def test_the_planner_counts_the_same_rows(size: int) -> None:
    shape = Shape(layers=2, hidden=64, heads=4, seq=16, vocab=size)
    degrees = np.array([1, 2, 3, 8, 64])
    assert vocab_rows(shape, degrees).tolist() == [shard_size(size, t) for t in degrees.tolist()]
    assert all(vocab_rows(shape, t) == shard_size(size, t) for t in degrees.tolist())
