"""Implement `kernels.rotary` in Triton: read and write a value once, whatever its memory layout.

Imported only where Triton is installed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from autoptd.kernels.rows_triton import ceil_div, computed, four_dims, launched, next_power_of_2

Tensor = torch.Tensor
# Pairs of elements that one program rotates.
ELEMENTS = 2048
# Larger offsets, including those past the last row, do not fit in 32 bits.
LARGE = 2**31 - 2 * ELEMENTS


def turned(
    x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype, is_back: bool, interleaved: bool
) -> Tensor:
    """Rotate x forward or back, into a tensor of `dtype`: see `kernels.rotary`."""
    # Queries are often a transposed view [b, heads, s, k] of [b, s, heads, k]: read it without a copy.
    x = x if x.stride(-1) == 1 and x.ndim <= 4 else x.contiguous()
    out = torch.empty_like(x, dtype=dtype)
    # empty_like keeps the strides of an expanded x: its dims may be in another order.
    if out.stride(-1) != 1:
        out = torch.empty(x.shape, dtype=dtype, device=x.device)
    width = cos.shape[-1]
    size = (*x.shape[:-1], width)
    # Broadcast dims have stride 0.
    cos, sin = (four_dims(each.contiguous().expand(size)) for each in (cos, sin))
    source, target = four_dims(x), four_dims(out)
    rows = x.numel() // x.shape[-1] if x.shape[-1] else 0
    if rows and width:
        block = next_power_of_2(width // 2)
        # Several rows per program: heads are narrow, and one row would be too little work.
        height = max(1, ELEMENTS // block)
        launched(_turn, (ceil_div(rows, height),), x)(
            source,
            cos,
            sin,
            target,
            rows,
            width // 2,
            *source.shape[1:3],
            *source.stride()[:3],
            *target.stride()[:3],
            *cos.stride()[:3],
            *sin.stride()[:3],
            BACK=is_back,
            INTERLEAVED=interleaved,
            WIDE=computed(torch.promote_types(x.dtype, cos.dtype)),
            IS_LARGE=max(rows, *map(_extent, (source, target, cos, sin))) > LARGE,
            HEIGHT=height,
            BLOCK=block,
        )
    if width < x.shape[-1]:
        # The elements that are not rotated (GPT-NeoX rotates a quarter of a head).
        out[..., width:] = x[..., width:]
    return out


def _extent(x: Tensor) -> int:
    """Return the offset of a tensor's last element from its first."""
    return sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))


@triton.jit
def _turn(
    x,
    cos,
    sin,
    out,
    rows,
    half,
    size_b,
    size_q,
    x_a,
    x_b,
    x_q,
    out_a,
    out_b,
    out_q,
    cos_a,
    cos_b,
    cos_q,
    sin_a,
    sin_b,
    sin_q,
    BACK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    WIDE: tl.constexpr,
    IS_LARGE: tl.constexpr,
    HEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * HEIGHT
    if IS_LARGE:
        row = tl.program_id(0).to(tl.int64) * HEIGHT
    row += tl.arange(0, HEIGHT)[:, None]
    known = row < rows
    # row = (a * size_b + b) * size_q + q, of [a, b, q, k].
    q = row % size_q
    b = row // size_q % size_b
    a = row // size_q // size_b
    u, v = _pairs(x + (a * x_a + b * x_b + q * x_q), known, half, INTERLEAVED, WIDE, HEIGHT, BLOCK)
    cos_u, cos_v = _pairs(
        cos + (a * cos_a + b * cos_b + q * cos_q), known, half, INTERLEAVED, WIDE, HEIGHT, BLOCK
    )
    sin_u, sin_v = _pairs(
        sin + (a * sin_a + b * sin_b + q * sin_q), known, half, INTERLEAVED, WIDE, HEIGHT, BLOCK
    )
    if BACK:
        y_u, y_v = u * cos_u + v * sin_v, v * cos_v - u * sin_u
    else:
        y_u, y_v = u * cos_u - v * sin_u, v * cos_v + u * sin_v
    out += a * out_a + b * out_b + q * out_q
    y_u, y_v = y_u.to(out.dtype.element_ty), y_v.to(out.dtype.element_ty)
    if INTERLEAVED:
        lane = tl.arange(0, 2 * BLOCK)[None, :]
        tl.store(
            out + lane, tl.reshape(tl.join(y_u, y_v), [HEIGHT, 2 * BLOCK]), mask=known & (lane < 2 * half)
        )
    else:
        pair = tl.arange(0, BLOCK)[None, :]
        tl.store(out + pair, y_u, mask=known & (pair < half))
        tl.store(out + pair + half, y_v, mask=known & (pair < half))


@triton.jit
def _pairs(
    at,
    known,
    half,
    INTERLEAVED: tl.constexpr,
    WIDE: tl.constexpr,
    HEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Load the first and the second elements of the pairs; neighbours are loaded together, then split."""
    if INTERLEAVED:
        lane = tl.arange(0, 2 * BLOCK)[None, :]
        both = tl.load(at + lane, mask=known & (lane < 2 * half), other=0.0).to(WIDE)
        u, v = tl.split(tl.reshape(both, [HEIGHT, BLOCK, 2]))
    else:
        pair = tl.arange(0, BLOCK)[None, :]
        u = tl.load(at + pair, mask=known & (pair < half), other=0.0).to(WIDE)
        v = tl.load(at + pair + half, mask=known & (pair < half), other=0.0).to(WIDE)
    return u, v
