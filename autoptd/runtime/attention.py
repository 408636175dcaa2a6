"""Causal attention of the queries that one rank has, to the keys of all ranks: only what lies before them is read.

In: this rank's queries, q [..., l, k], and the whole keys and values, [..., s, k] and [..., s, e], of c ranks with l
tokens each. Out: this rank's part of the result. Of the s keys the queries of rank i see the first (i + 1) l: that many
are multiplied, not all of them under a mask.

    y = causal_attention(q, k, v, cp)

torch's `is_causal` counts queries and keys both from the first one, where here the last query sees the last key that is read.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from autoptd.ir.types import ZIGZAG
from autoptd.runtime.world.world import Group

Tensor = torch.Tensor


def causal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: Group,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    order: str = "",
) -> Tensor:
    """Return softmax(q k^T * scale) v, where a query sees the keys up to its own place in the whole sequence.

    With order="zigzag" the queries are two of 2c pieces (`shards.py`), and see 2c + 1 pieces of keys together, on every rank.
    """
    c, index = group.size, group.index
    places = (index, 2 * c - 1 - index) if order == ZIGZAG else (index,)
    length = q.shape[-2] // len(places)
    # From the last key on, once for both pieces: see `_from_behind`.
    turned = (k.flip(-2), v.flip(-2)) if places != (0,) and not q.is_cuda else None
    results = []
    for place, part in zip(places, q.split(length, -2), strict=True):
        first = place * length
        if first and turned is not None:
            results.append(_from_behind(first, part, *turned, scale, enable_gqa))
        else:
            # A view would keep all keys until backward, beside those that are turned.
            own = (k, v) if turned is None else (k[..., :length, :].clone(), v[..., :length, :].clone())
            results.append(_from(first, part, *own, scale, enable_gqa))
    return torch.cat(results, -2) if len(results) > 1 else results[0]


def _from(first: int, q: Tensor, k: Tensor, v: Tensor, scale: float | None, enable_gqa: bool) -> Tensor:
    """Return causal attention of queries whose first one has place `first`."""
    length = q.shape[-2]
    seen = min(first + length, k.shape[-2])
    mask: Tensor | None = None
    if first and seen == first + length:
        # The kernels of CUDA devices need no mask in memory.
        mask = causal_lower_right(length, seen)  # type: ignore[assignment]
    elif first:
        mask = torch.ones(length, seen, dtype=torch.bool, device=q.device).tril_(first)
    k, v = k[..., :seen, :], v[..., :seen, :]
    return F.scaled_dot_product_attention(
        q, k, v, mask, is_causal=mask is None, scale=scale, enable_gqa=enable_gqa
    )


def _from_behind(
    first: int, q: Tensor, k: Tensor, v: Tensor, scale: float | None, enable_gqa: bool
) -> Tensor:
    """Return the same of keys and values whose last one is the first.

    Whether query i sees key j of these depends on i + j alone. So the mask [l, s] that kernels for CPUs read, and keep until
    backward, is one line of l + s - 1 numbers in memory.
    """
    length, every = q.shape[-2], k.shape[-2]
    seen = min(first + length, every)
    line = q.new_zeros(length + seen - 1)
    line[: max(seen - 1 - first, 0)] = -math.inf
    k, v = k[..., every - seen :, :], v[..., every - seen :, :]
    mask = line.as_strided((length, seen), (1, 1))
    return F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=enable_gqa)


__all__ = ["causal_attention"]
