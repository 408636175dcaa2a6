"""Implement `kernels.softmax` in Triton: read and write each row of scores, or of gradients, once.

SC'21, section 4.2 has separate kernels for a general and for the causal mask; here they are two compilations
of `_forward`.

Imported only where Triton is installed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from autoptd.kernels.rows_triton import computed, four_dims, launched, row_size

Tensor = torch.Tensor
TYPES = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}


def softmax_forward(
    scores: Tensor, mask: Tensor | None, scale: float, causal: bool, dtype: torch.dtype | None
) -> Tensor:
    """Return softmax(scores * scale + mask) of scores [..., q, k]: see `kernels.softmax.masked_softmax`."""
    scores = scores.contiguous()
    is_bool = mask is not None and mask.dtype == torch.bool
    like = scores.dtype if mask is None or is_bool else torch.result_type(scores, mask)
    out = torch.empty(scores.shape, dtype=dtype or like, device=scores.device)
    shape = four_dims(scores).shape
    strides: tuple[int, ...] = (0, 0, 0, 0)
    if mask is not None:
        # Expanded dims have stride 0: a mask of [s, s] is not copied for every head.
        mask = four_dims((mask.view(torch.uint8) if is_bool else mask).expand(scores.shape))
        strides = mask.stride()
    if scores.numel():
        # One program per row of scores.
        launched(_forward, (scores.numel() // shape[-1],), scores)(
            scores,
            scores if mask is None else mask,
            out,
            *shape[1:],
            *strides,
            SCALE=scale,
            HAS_MASK=mask is not None,
            IS_BOOL=is_bool,
            CAUSAL=causal,
            LIKE=TYPES[like],
            WIDE=computed(out.dtype if scores.dtype != torch.float64 else scores.dtype),
            **row_size(shape[-1]),
        )
    return out


def softmax_backward(grad: Tensor, out: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Return the gradient of the scores, in `dtype`."""
    grad = grad.contiguous()
    dx = torch.empty(out.shape, dtype=dtype, device=out.device)
    width = out.shape[-1]
    if out.numel():
        rows = out.numel() // width
        launched(_backward, (rows,), grad)(
            grad, out, dx, width, SCALE=scale, WIDE=computed(out.dtype), **row_size(width)
        )
    return dx


@triton.jit
def _forward(
    scores,
    mask,
    out,
    heads,
    queries,
    keys,
    stride_a,
    stride_b,
    stride_q,
    stride_k,
    SCALE: tl.constexpr,
    HAS_MASK: tl.constexpr,
    IS_BOOL: tl.constexpr,
    CAUSAL: tl.constexpr,
    LIKE: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    query = row % queries
    key = tl.arange(0, BLOCK)
    inside = key < keys
    x = tl.load(scores + row * keys + key, mask=inside, other=0.0)
    # Round as the plain form does.
    x = (x.to(WIDE) * SCALE).to(x.dtype).to(WIDE)
    # Mask after scaling, as the scale may be negative.
    x = tl.where(inside, x, -float("inf"))
    if HAS_MASK:
        # row = (a * heads + b) * queries + query.
        start = row // queries // heads * stride_a + row // queries % heads * stride_b + query * stride_q
        at = tl.load(mask + start + key * stride_k, mask=inside, other=0)
        if IS_BOOL:  # noqa: SIM108 - compiled for one of the two
            x = tl.where(at != 0, x, -float("inf"))
        else:
            x = (x + at.to(WIDE)).to(LIKE).to(WIDE)
    if CAUSAL:
        x = tl.where(key <= query, x, -float("inf"))
    # A row of nothing but -inf becomes NaN here, as in the plain form.
    e = tl.exp(x - tl.max(x, 0))
    tl.store(out + row * keys + key, (e / tl.sum(e, 0)).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward(grad, out, dx, keys, SCALE: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * keys + tl.arange(0, BLOCK)
    inside = tl.arange(0, BLOCK) < keys
    g = tl.load(grad + at, mask=inside, other=0.0).to(WIDE)
    p = tl.load(out + at, mask=inside, other=0.0).to(WIDE)
    # dx = scale p (g - sum(g p)).
    tl.store(dx + at, (p * (g - tl.sum(g * p, 0)) * SCALE).to(dx.dtype.element_ty), mask=inside)
