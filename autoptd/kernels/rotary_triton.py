"""`kernels.rotary` in Triton: a value is read once and written once, in whatever order its dims lie.

Imported where Triton is at hand only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from autoptd.kernels.rows_triton import computed, four_dims

Tensor = torch.Tensor
ELEMENTS = 2048  # pairs of one program


def turned(x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype, is_back: bool, interleaved: bool) -> Tensor:
    """Rotate x forward or back, into a tensor of `dtype`: see `kernels.rotary`."""
    x = x if x.stride(-1) == 1 and x.ndim <= 4 else x.contiguous()
    out = torch.empty_like(x, dtype=dtype)
    if out.stride(-1) != 1:  # of an expanded x its dims are in another order
        out = torch.empty(x.shape, dtype=dtype, device=x.device)
    width = cos.shape[-1]
    size = (*x.shape[:-1], width)
    cos, sin = (four_dims(each.contiguous().expand(size)) for each in (cos, sin))
    source, target = four_dims(x), four_dims(out)
    rows = x.numel() // x.shape[-1] if x.shape[-1] else 0
    if rows and width:
        block = triton.next_power_of_2(width // 2)
        height = max(1, ELEMENTS // block)
        _turn[(triton.cdiv(rows, height),)](
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
            HEIGHT=height,
            BLOCK=block,
        )
    out[..., width:] = x[..., width:]
    return out


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
    HEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * HEIGHT + tl.arange(0, HEIGHT)[:, None]
    pair = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (pair < half)
    one, two = pair, pair + half
    if INTERLEAVED:
        one, two = 2 * pair, 2 * pair + 1
    q = row % size_q
    b = row // size_q % size_b
    a = row // size_q // size_b
    x += a * x_a + b * x_b + q * x_q
    out += a * out_a + b * out_b + q * out_q
    cos += a * cos_a + b * cos_b + q * cos_q
    sin += a * sin_a + b * sin_b + q * sin_q
    u = tl.load(x + one, mask=inside, other=0.0).to(WIDE)
    v = tl.load(x + two, mask=inside, other=0.0).to(WIDE)
    cos_u = tl.load(cos + one, mask=inside, other=0.0).to(WIDE)
    cos_v = tl.load(cos + two, mask=inside, other=0.0).to(WIDE)
    sin_u = tl.load(sin + one, mask=inside, other=0.0).to(WIDE)
    sin_v = tl.load(sin + two, mask=inside, other=0.0).to(WIDE)
    if BACK:
        y_u, y_v = u * cos_u + v * sin_v, v * cos_v - u * sin_u
    else:
        y_u, y_v = u * cos_u - v * sin_u, v * cos_v + u * sin_v
    tl.store(out + one, y_u.to(out.dtype.element_ty), mask=inside)
    tl.store(out + two, y_v.to(out.dtype.element_ty), mask=inside)
