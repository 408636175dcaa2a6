"""Implement `kernels.norms` in Triton.

Forward and backward each read a row and its residual once; backward also sums the gradients of the weights.
It runs one or a few programs per multiprocessor; each loops over its rows and keeps partial sums, which are
added up at the end. A row that does not fit in registers together with its sums is read twice, the second
time from the cache.

Imported only where Triton is installed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from autoptd.kernels.forms import wide
from autoptd.kernels.rows_triton import ceil_div, computed, launched, programs, row_size

Tensor = torch.Tensor
# Elements of a row that backward keeps in registers in addition to its sums.
HELD = 8192


def rms_norm_forward(
    x: Tensor, weight: Tensor | None, residual: Tensor | None, eps: float, offset: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (y, the normalised input, the factor of every row [..., 1])."""
    y, total, _, factor = _norm(x, weight, None, residual, eps, offset, dtype, False)
    return y, total, factor


def rms_norm_backward(
    grad: Tensor,
    grad_total: Tensor | None,
    total: Tensor,
    factor: Tensor,
    weight: Tensor | None,
    offset: float,
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of the normalised input and of the weight."""
    dx, (dw,) = _norm_backward(grad, grad_total, total, factor, factor, (weight,), offset, False)
    return dx, dw


def layer_norm_forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (y, the normalised input, mean and factor of every row)."""
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
    """Return the gradients of the normalised input, of the weight and of the bias."""
    dx, (dw, db) = _norm_backward(grad, grad_total, total, mean, factor, (weight, bias), 0.0, True)
    return dx, dw, db


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
    factor = x.new_empty((*x.shape[:-1], 1), dtype=wide(x.dtype))
    # Only layer norm (CENTERED) writes the mean.
    mean = torch.empty_like(factor) if centered else factor
    width = x.shape[-1]
    if x.numel():
        # One program per row. x stands in for absent tensors, which are never read as their HAS_ is False.
        launched(_forward, (x.numel() // width,), x)(
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
    weights: tuple[Tensor | None, ...],
    offset: float,
    centered: bool,
) -> tuple[Tensor, list[Tensor | None]]:
    """Return the gradients of the normalised input, and of the weight and the bias where present."""
    grad = grad.contiguous()
    dx = torch.empty_like(total)
    width = total.shape[-1]
    rows = total.numel() // max(width, 1)
    size = row_size(width, most=16)
    count = programs(rows, size["num_warps"], total.device)
    weight = weights[0]
    # The weight, the bias, both or neither.
    present = [parameter for parameter in weights if parameter is not None]
    # Each program writes a row of partial sums.
    sums = factor.new_empty((len(present), count, width))
    if total.numel():
        launched(_backward, (count,), grad)(
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
            ceil_div(rows, count),
            OFFSET=offset,
            CENTERED=centered,
            HAS_WEIGHT=weight is not None,
            HAS_BIAS=len(present) > (weight is not None),
            HAS_TOTAL=grad_total is not None,
            READS_TWICE=size["BLOCK"] > HELD,
            WIDE=computed(total.dtype),
            **size,
        )
    totals = sums.sum(1)
    if len({parameter.dtype for parameter in present}) == 1:
        totals = totals.to(present[0].dtype)  # both by one kernel
    # In the order of `present`; None again where there is no weight or bias.
    each = iter(totals.unbind())
    grads = [None if parameter is None else next(each).to(parameter.dtype) for parameter in weights]
    return dx, grads


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
        # Round before normalising, as the plain form does; backward reads the rounded sum.
        value = (value.to(WIDE) + other.to(WIDE)).to(value.dtype)
        tl.store(total + at, value, mask=inside)
    value = value.to(WIDE)
    if CENTERED:
        middle = tl.sum(value, 0) / width
        # Zero the lanes past the row: they would add middle^2 to the variance.
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
    HAS_BIAS: tl.constexpr,
    HAS_TOTAL: tl.constexpr,
    READS_TWICE: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    column = tl.arange(0, BLOCK)
    inside = column < width
    scale = tl.full([BLOCK], 1.0, WIDE)
    if HAS_WEIGHT and not READS_TWICE:
        scale = tl.load(weight + column, mask=inside, other=0.0).to(WIDE) + OFFSET
    weight_sum = tl.zeros([BLOCK], WIDE)
    bias_sum = tl.zeros([BLOCK], WIDE)
    for step in range(0, steps):
        # Rows are assigned round-robin; programs without a row in the last round mask all columns.
        row = tl.program_id(0).to(tl.int64) + step * count
        inside = column < tl.where(row < rows, width, 0)
        at = row * width + column
        # Past the last row, read the last row's statistics: the masked columns contribute 0.
        known = tl.minimum(row, rows - 1)
        r = tl.load(factor + known)
        middle = tl.load(mean + known)
        # Different eviction policies keep the compiler from merging the two loads of a row.
        g = tl.load(grad + at, mask=inside, other=0.0, eviction_policy="evict_last").to(WIDE)
        value = tl.load(total + at, mask=inside, other=0.0, eviction_policy="evict_last").to(WIDE)
        if CENTERED:
            value = tl.where(inside, value - middle, 0.0)
        value *= r
        if HAS_BIAS:
            # y = x' scale + bias: the bias sums g as it comes, the weight g times the normed row x'.
            bias_sum += g
        if HAS_WEIGHT:
            weight_sum += g * value
            if READS_TWICE:
                scale = (
                    tl.load(weight + column, mask=inside, other=0.0, eviction_policy="evict_last").to(WIDE)
                    + OFFSET
                )
            g *= scale
        # With g times the weight: dx = r (g - x' mean(g x') - mean(g)), for RMS without mean(g).
        slope = tl.sum(g * value, 0) / width
        level = tl.sum(g, 0) / width
        if READS_TWICE:
            # Two rows of more than HELD elements plus the sums would spill: read from the cache again.
            g = tl.load(grad + at, mask=inside, other=0.0, eviction_policy="evict_first").to(WIDE)
            value = tl.load(total + at, mask=inside, other=0.0, eviction_policy="evict_first").to(WIDE)
            if CENTERED:
                value -= middle
            value *= r
            if HAS_WEIGHT:
                scale = tl.load(weight + column, mask=inside, other=0.0, eviction_policy="evict_first").to(
                    WIDE
                )
                g *= scale + OFFSET
        change = g - value * slope
        if CENTERED:
            change -= level
        change *= r
        if HAS_TOTAL:
            change += tl.load(grad_total + at, mask=inside, other=0.0).to(WIDE)
        tl.store(dx + at, change.to(dx.dtype.element_ty), mask=inside)
    inside = column < width
    place = tl.program_id(0) * width + column
    if HAS_WEIGHT:
        tl.store(sums + place, weight_sum, mask=inside)
        # sums[0] belongs to the weight and sums[1] to the bias; without a weight, sums[0] to the bias.
        place += count * width
    if HAS_BIAS:
        tl.store(sums + place, bias_sum, mask=inside)
