"""Causal attention of a rank's own queries: what it sees, counted key by key."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autoptd import runtime as rt


def keys_seen(order: str, c: int, index: int, length: int) -> torch.Tensor:
    """How many keys each query of a rank sees: with scores of 0 each counts the same, and the first alone has a value."""
    blocks: Any = rt.Zigzag() if order else 1
    q, k = torch.zeros(2, 1, 1, length, 4, dtype=torch.float64)
    v = torch.zeros_like(k)
    v[:, :, 0] = 1
    group: Any = SimpleNamespace(size=c, index=index)
    found = rt.causal_attention(rt.take_shard(q, 2, blocks, index, c), k, v, group, order=order)
    return (1 / found[0, 0, :, 0]).round().long()


@pytest.mark.parametrize("c", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("order", ["zigzag", ""])
def test_a_query_sees_the_keys_up_to_its_own(order: str, c: int) -> None:
    """In zigzag order every rank has as many pairs of query and key; in chunks later ones have more."""
    length = 12 * c
    seen = [keys_seen(order, c, index, length) for index in range(c)]
    assert torch.equal(rt.join_shards(seen, 0, rt.Zigzag() if order else 1), torch.arange(1, length + 1))
    pairs = [int(each.sum()) for each in seen]
    assert sum(pairs) == length * (length + 1) // 2
    if order:
        assert len(set(pairs)) == 1
    else:
        assert pairs == [12 * (12 * index) + 78 for index in range(c)]
