"""`kernels.norms` in Triton: forward reads a row once, its residual with it; backward once, and sums the weights' gradients.

Backward runs a few programs a multiprocessor; each goes through rows of its own, keeps their sums, and these are added up.

Imported where Triton is at hand only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from autoptd.kernels.forms import wide
from autoptd.kernels.rows_triton import computed, programs, row_size

Tensor = torch.Tensor


def rms_norm_forward(
    x: Tensor, weight: Tensor | None, residual: Tensor | None, eps: float, offset: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (y, what was normed, the factor of every row [..., 1])."""
    y, total, _, factor = _norm(x, weight, None, residual, eps, offset, dtype, False)
    return y, total, factor


def rms_norm_backward(
    grad: Tensor, grad_total: Tensor | None, total: Tensor, factor: Tensor, weight: Tensor | None, offset: float
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of what was normed and of the weight."""
    dx, dw, _ = _norm_backward(grad, grad_total, total, factor, factor, weight, offset, False)
    return dx, None if weight is None else dw.to(weight.dtype)


def layer_norm_forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (y, what was normed, mean and factor of every row)."""
    return _norm(x, weight, bias, residual, eps, 0.0, x.dtype, True)


def layer_norm_backward(
    grad: Tensor,
    grad_total: Tensor | None,
    total: Tensor,
    mean: Tensor,
    factor: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of what was normed, of the weight and of the bias."""
    dx, dw, db = _norm_backward(grad, grad_total, total, mean, factor, weight, 0.0, True)
    return dx, None if weight is None else dw.to(weight.dtype), None if bias is None else db.to(bias.dtype)


def _norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float,
    offset: float,
    dtype: torch.dtype,
    centered: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x = x.contiguous()
    total = x if residual is None else torch.empty_like(x)
    y = torch.empty_like(x, dtype=dtype)
    mean, factor = x.new_empty((2, *x.shape[:-1], 1), dtype=wide(x.dtype))
    width = x.shape[-1]
    if x.numel():
        _forward[(x.numel() // width,)](
            x,
            x if residual is None else residual.contiguous(),
            x if weight is None else weight.contiguous(),
            x if bias is None else bias.contiguous(),
            y,
            total,
            mean,
            factor,
            width,
            EPS=eps,
            OFFSET=offset,
            CENTERED=centered,
            HAS_WEIGHT=weight is not None,
            HAS_BIAS=bias is not None,
            HAS_RESIDUAL=residual is not None,
            WIDE=computed(x.dtype),
            **row_size(width),
        )
    return y, total, mean, factor


def _norm_backward(
    grad: Tensor,
    grad_total: Tensor | None,
    total: Tensor,
    mean: Tensor,
    factor: Tensor,
    weight: Tensor | None,
    offset: float,
    centered: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    grad = grad.contiguous()
    dx = torch.empty_like(total)
    width = total.shape[-1]
    rows = total.numel() // max(width, 1)
    count = programs(rows, total.device)
    sums = factor.new_zeros((2, count, width))
    if total.numel():
        _backward[(count,)](
            grad,
            grad if grad_total is None else grad_total.contiguous(),
            total,
            mean,
            factor,
            total if weight is None else weight.contiguous(),
            dx,
            sums,
            rows,
            width,
            count,
            triton.cdiv(rows, count),
            OFFSET=offset,
            CENTERED=centered,
            HAS_WEIGHT=weight is not None,
            HAS_TOTAL=grad_total is not None,
            WIDE=computed(total.dtype),
            **row_size(width),
        )
    dw, db = sums.sum(1)
    return dx, dw, db


@triton.jit
def _forward(
    x,
    residual,
    weight,
    bias,
    y,
    total,
    mean,
    factor,
    width,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    CENTERED: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    at = row * width + column
    value = tl.load(x + at, mask=inside, other=0.0)
    if HAS_RESIDUAL:
        other = tl.load(residual + at, mask=inside, other=0.0)
        value = (value.to(WIDE) + other.to(WIDE)).to(value.dtype)
        tl.store(total + at, value, mask=inside)
    value = value.to(WIDE)
    if CENTERED:
        middle = tl.sum(value, 0) / width
        value = tl.where(inside, value - middle, 0.0)
        tl.store(mean + row, middle)
    r = 1.0 / tl.sqrt(tl.sum(value * value, 0) / width + EPS)
    tl.store(factor + row, r)
    value *= r
    if HAS_WEIGHT:
        value *= tl.load(weight + column, mask=inside, other=0.0).to(WIDE) + OFFSET
    if HAS_BIAS:
        value += tl.load(bias + column, mask=inside, other=0.0).to(WIDE)
    tl.store(y + at, value.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    grad,
    grad_total,
    total,
    mean,
    factor,
    weight,
    dx,
    sums,
    rows,
    width,
    count,
    steps,
    OFFSET: tl.constexpr,
    CENTERED: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_TOTAL: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    column = tl.arange(0, BLOCK)
    inside = column < width
    scale = tl.full([BLOCK], 1.0, WIDE)
    if HAS_WEIGHT:
        scale = tl.load(weight + column, mask=inside, other=0.0).to(WIDE) + OFFSET
    weight_sum = tl.zeros([BLOCK], WIDE)
    bias_sum = tl.zeros([BLOCK], WIDE)
    for step in range(0, steps):
        row = tl.program_id(0).to(tl.int64) + step * count
        inside = column < tl.where(row < rows, width, 0)
        at = row * width + column
        g = tl.load(grad + at, mask=inside, other=0.0).to(WIDE)
        value = tl.load(total + at, mask=inside, other=0.0).to(WIDE)
        known = tl.minimum(row, rows - 1)  # behind the last row everything is 0
        r = tl.load(factor + known)
        if CENTERED:
            value = tl.where(inside, value - tl.load(mean + known), 0.0)
            bias_sum += g
        value *= r
        weight_sum += g * value
        g *= scale
        change = g - value * (tl.sum(g * value, 0) / width)
        if CENTERED:
            change -= tl.sum(tl.where(inside, g, 0.0), 0) / width
        change *= r
        if HAS_TOTAL:
            change += tl.load(grad_total + at, mask=inside, other=0.0).to(WIDE)
        tl.store(dx + at, change.to(dx.dtype.element_ty), mask=inside)
    place = tl.program_id(0) * width + column
    inside = column < width
    tl.store(sums + place, weight_sum, mask=inside)
    if CENTERED:
        tl.store(sums + count * width + place, bias_sum, mask=inside)
