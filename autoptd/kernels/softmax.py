"""Fuse scale, mask and softmax of attention scores: one operator instead of four (SC'21, section 4.2).

In: scores [..., q, k], a mask that broadcasts to them (bool: True where to attend; else added), or causal:
query i attends to keys 0 to i. Out: `softmax(scores * scale + mask)` over the last dim. Saved for backward:
the result, and with a bool mask one bool per mask row to mark rows that attend to nothing: they are NaN with
a zero gradient, as in the plain form.

    weights = masked_softmax(q @ k.transpose(-1, -2), scale=k.shape[-1] ** -0.5, causal=True)
"""

from __future__ import annotations

from typing import Any

import torch

from autoptd.kernels.forms import needs_no_grad, takes_triton, tiles

Tensor = torch.Tensor
aten = torch.ops.aten


def masked_softmax(
    scores: Tensor,
    mask: Tensor | None = None,
    *,
    scale: float = 1.0,
    causal: bool = False,
    dtype: torch.dtype | None = None,
    backend: str = "eager",
) -> Tensor:
    """Return softmax(scores * scale + mask) over the last dim.

    `dtype` is the dtype of computation and result, as in torch.
    """
    needs_no_grad(mask, "mask", "masked_softmax")
    # The scores would be broadcast to the mask.
    if mask is not None and torch.broadcast_shapes(scores.shape, mask.shape) != scores.shape:
        return masked_softmax_plain(scores, mask, scale=scale, causal=causal, dtype=dtype)
    triton = takes_triton(backend, scores, "masked_softmax", scores.shape[-1])
    return _MaskedSoftmax.apply(scores, mask, scale, causal, dtype, triton)  # type: ignore[no-any-return, no-untyped-call]


def masked_softmax_plain(
    scores: Tensor,
    mask: Tensor | None = None,
    *,
    scale: float = 1.0,
    causal: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute `masked_softmax` as models spell it."""
    scores = scores * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    if causal:
        scores = scores.masked_fill(later_keys(scores), -torch.inf)
    return torch.softmax(scores, -1, dtype=dtype)


def later_keys(scores: Tensor) -> Tensor:
    """Return a bool [q, k] that is True where key j comes after query i."""
    return torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu_(1)


class _MaskedSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        scores: Tensor,
        mask: Tensor | None,
        scale: float,
        causal: bool,
        dtype: torch.dtype | None,
        triton: bool,
    ) -> Tensor:
        ctx.scale, ctx.dtype, ctx.triton = scale, scores.dtype, triton
        out = _forward(scores, mask, scale, causal, dtype, triton)
        dead = None
        if ctx.needs_input_grad[0] and mask is not None and mask.dtype == torch.bool:
            # The softmax of a row of nothing but -inf is NaN, and so would be its gradient.
            attended = mask & ~later_keys(scores) if causal else mask
            dead = ~attended.any(-1, keepdim=True)
        ctx.save_for_backward(out, dead)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        out, dead = ctx.saved_tensors
        if ctx.triton:
            from autoptd.kernels.softmax_triton import softmax_backward

            dx = softmax_backward(grad, out, ctx.scale, ctx.dtype)
            return (dx if dead is None else dx.masked_fill_(dead, 0.0)), None, None, None, None, None
        dx = torch.empty(out.shape, dtype=ctx.dtype, device=out.device)
        dead = None if dead is None else dead.expand(*out.shape[:-1], 1)
        for at in tiles(out):
            part = aten._softmax_backward_data(grad[at], out[at], -1, out.dtype)
            if dead is not None:
                part.masked_fill_(dead[at], 0.0)
            if part.dtype == dx.dtype:
                torch.mul(part, ctx.scale, out=dx[at])
            else:
                # Round once, after scaling.
                dx[at].copy_(part.mul_(ctx.scale))
        return dx, None, None, None, None, None


def _forward(
    scores: Tensor, mask: Tensor | None, scale: float, causal: bool, dtype: torch.dtype | None, triton: bool
) -> Tensor:
    if triton:
        from autoptd.kernels.softmax_triton import softmax_forward

        return softmax_forward(scores, mask, scale, causal, dtype)
    # Two kinds of masks: `added` to the scores, or `masked` out, which includes the causal mask.
    added = None if mask is None or mask.dtype == torch.bool else mask.expand(scores.shape)
    masked = None if added is not None or mask is None else ~mask
    if causal:
        masked = later_keys(scores) if masked is None else masked | later_keys(scores)
    masked = None if masked is None else masked.expand(scores.shape)
    # The dtype of scores + mask in the plain form.
    like = scores.dtype if added is None else torch.result_type(scores, added)
    out = torch.empty(scores.shape, dtype=dtype or like, device=scores.device)
    for at in tiles(scores):
        # Scale, mask and exponentiate a tile of scores while it is in the cache.
        part = scores[at] * scale
        if added is not None:
            part = part.add_(added[at]) if part.dtype == like else part + added[at]
        if masked is not None:
            part.masked_fill_(masked[at], -torch.inf)
        torch.softmax(part, -1, dtype=dtype, out=out[at])
    return out
