"""Causal attention of the queries that one rank has, to the keys of all ranks: only what lies before them is read.

In: this rank's queries, q [..., l, k], and the whole keys and values, [..., s, k] and [..., s, e], of c ranks with l
tokens each. Out: this rank's part of the result. Of the s keys the queries of rank i see the first (i + 1) l: that many
are multiplied, not all of them under a mask.

    y = causal_attention(q, k, v, cp)

torch's `is_causal` counts queries and keys both from the first one, where here the last query sees the last key that is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

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
    window: int | None = None,
) -> Tensor:
    """Return softmax(q k^T * scale) v, where a query sees the keys up to its own place in the whole sequence.

    With order="zigzag" the queries are two of 2c pieces (`shards.py`), and see 2c + 1 pieces of keys together, on every rank.
    With a `window` they see at most that number of keys, ending with their own.
    """
    c, index = group.size, group.index
    places = (index, 2 * c - 1 - index) if order == ZIGZAG else (index,)
    length = q.shape[-2] // len(places)
    firsts = tuple(place * length for place in places)
    if window is None and _fits_kernel(q, k, v):
        return _InBlocks.apply(*map(_last_stride_one, (q, k, v)), firsts, scale)  # type: ignore[no-any-return]
    parts = zip(firsts, q.split(length, -2), strict=True)
    how = {"scale": scale, "enable_gqa": enable_gqa}
    if window is None:
        results = [_masked(first, part, k, v, how) for first, part in parts]
    else:
        results = [_in_window(first, part, k, v, window, how) for first, part in parts]
    return torch.cat(results, -2) if len(results) > 1 else results[0]


def _in_window(first: int, q: Tensor, k: Tensor, v: Tensor, window: int, how: dict[str, Any]) -> Tensor:
    """Return attention of queries whose first one has place `first`, each to its own key and those before it in a window."""
    start, end = max(0, first - window + 1), first + q.shape[-2]
    k, v = k[..., start:end, :], v[..., start:end, :]
    # Query i stands at first + i, key j at start + j.
    own = first - start
    seen = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril_(own)
    return F.scaled_dot_product_attention(q, k, v, seen.triu_(own - window + 1), **how)


def _masked(first: int, q: Tensor, k: Tensor, v: Tensor, how: dict[str, Any]) -> Tensor:
    """Return causal attention of queries whose first one has place `first`, by one kernel."""
    length = q.shape[-2]
    seen = min(first + length, k.shape[-2])
    k, v = k[..., :seen, :], v[..., :seen, :]
    if first and seen == first + length and q.is_cuda:
        # Imported here: it imports torch's compiler, which takes a second.
        from torch.nn.attention.bias import causal_lower_right

        # The kernels of CUDA devices need no mask in memory. Called by itself: the runtime works where classes of tensors
        # have no say, and torch would read the mask as a tensor.
        mask = causal_lower_right(length, seen)
        return type(mask).__torch_function__(F.scaled_dot_product_attention, (), (q, k, v, mask), how)  # type: ignore[no-any-return]
    rest = torch.ones(length, seen, dtype=torch.bool, device=q.device).tril_(first) if first else None
    return F.scaled_dot_product_attention(q, k, v, rest, is_causal=rest is None, **how)


class _InBlocks(torch.autograd.Function):
    """The same in blocks, for CPU kernels, which do not skip masked scores: earlier keys, then the diagonal.

    The two results are weighted by their sums of exponentials. The gradients of a block need only the overall
    result and log-sum-exp of the other (Dao 2023, FlashAttention-2, section 3.1). Half precision is computed
    in float32: rounding per block would be less accurate than one device.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, firsts: tuple[int, ...], scale: float | None
    ) -> Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        outs, logs = [], []
        for first, part in zip(firsts, q.chunk(len(firsts), -2), strict=True):
            found = []
            for keys, is_causal in _blocks(first, part.shape[-2], k.shape[-2]):
                mine = (x.to(wide) for x in (part, k[:, :, keys], v[:, :, keys]))
                found.append(_forward(*mine, 0.0, is_causal, scale=scale))
            out, log = found[0]
            for other, other_log in found[1:]:
                whole = torch.logaddexp(log, other_log)
                out = out.mul_((log - whole).exp_().unsqueeze(-1))
                out = out.addcmul_(other, (other_log - whole).exp_().unsqueeze(-1))
                log = whole
            outs.append(out.to(q.dtype))
            logs.append(log)
        # In the kernel's layout, [b, l, heads, e], which models view as [b, l, h] without a copy.
        result = torch.cat([x.transpose(1, 2) for x in outs], 1).transpose(1, 2) if len(outs) > 1 else outs[0]
        ctx.save_for_backward(q, k, v, result, *logs)
        ctx.firsts, ctx.scale = firsts, scale
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, result, *logs = ctx.saved_tensors
        wide = torch.promote_types(q.dtype, torch.float32)
        of_k, of_v = torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
        of_q = []
        of_result = _last_stride_one(grads[0])
        parts = zip(*(x.chunk(len(logs), -2) for x in (of_result, q, result)), strict=True)
        for first, log, part in zip(ctx.firsts, logs, parts, strict=True):
            grad, queries, out = (x.to(wide) for x in part)
            total: Tensor | None = None
            for keys, is_causal in _blocks(first, queries.shape[-2], k.shape[-2]):
                mine = (x[:, :, keys].to(wide) for x in (k, v))
                found = _backward(grad, queries, *mine, out, log, 0.0, is_causal, scale=ctx.scale)
                total = found[0] if total is None else total.add_(found[0])
                of_k[:, :, keys] += found[1]
                of_v[:, :, keys] += found[2]
            assert total is not None
            of_q.append(total.to(q.dtype))
        return torch.cat(of_q, -2), of_k.to(k.dtype), of_v.to(v.dtype), None, None


# [b, heads, l, k] and keys and values with as many heads, or with fewer that are shared by neighbours.
_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _blocks(first: int, length: int, every: int) -> Iterator[tuple[slice, bool]]:
    """The keys that queries from place `first` on see: all of those before them, and those up to each query's own."""
    if first:
        yield slice(0, min(first, every)), False
    if first < every:
        yield slice(first, min(first + length, every)), True


def _fits_kernel(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Tell whether the kernel for CPUs reads such tensors rightly: it checks neither sizes nor the last stride."""
    is_there = q.device.type in ("cpu", "meta") and q.ndim == k.ndim == v.ndim == 4
    return is_there and (
        q.shape[0] == k.shape[0] == v.shape[0]
        and k.shape[1] == v.shape[1]
        and q.shape[1] % k.shape[1] == 0
        and q.shape[-1] == k.shape[-1] == v.shape[-1]
    )


def _last_stride_one(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
