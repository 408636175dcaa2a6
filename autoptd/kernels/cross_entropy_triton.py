"""Implement the passes of `kernels.cross_entropy` over the logits in Triton.

One kernel reads the logits, one overwrites them with their gradient, and one does both where a rank has all
columns. All compute in float32 (float64 for float64), so narrower logits need no copy. Class weights are not
supported.

Imported only where Triton is installed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from autoptd.kernels.cross_entropy import Labels, Loss, Terms
from autoptd.kernels.forms import wide
from autoptd.kernels.rows_triton import ceil_div, computed, launched

Tensor = torch.Tensor
# Columns per iteration of a program.
BLOCK = 4096


def terms(loss: Loss, z: Tensor, labels: Labels) -> Terms:
    """Return the terms of the logits z [N, n], over all ranks; only the column stride must be 1."""
    # One program per row loops over all columns.
    maximum, total, weighted = z.new_zeros((3, len(z)), dtype=wide(z.dtype))
    picked = z.gather(1, labels.column.unsqueeze(1)).squeeze(1).to(maximum.dtype)
    if len(z):
        launched(_terms, (len(z),), z)(
            z,
            maximum,
            total,
            weighted,
            z.stride(0),
            loss.real,
            WIDE=computed(z.dtype),
            BLOCK=BLOCK,
            num_warps=8,
        )
    return loss.reduced(maximum, total, picked, weighted if loss.smoothing else None, labels)


def gradients_(loss: Loss, z: Tensor, terms: Terms, labels: Labels, grad: Tensor) -> Tensor:
    """Overwrite the logits z [N, n] with their gradient, given `grad`, the gradient of every row's loss."""
    return gradients(loss, z, terms, labels, grad, out=z)


def gradients(
    loss: Loss, z: Tensor, terms: Terms, labels: Labels, grad: Tensor, out: Tensor | None = None
) -> Tensor:
    """Return the gradient of the logits z [N, n], in `out` if there is one."""
    factor, hard, soft = loss.factors(terms, labels, grad)
    picked = hard.masked_fill(labels.elsewhere, 0.0)
    out = torch.empty_like(z) if out is None else out
    if len(z):
        # Given the terms, the blocks of a row are independent: one program each.
        launched(_gradients, (len(z), ceil_div(z.shape[1], BLOCK)), z)(
            z,
            out,
            terms.maximum,
            factor,
            picked,
            # Never read where SMOOTHS is False; a kernel's pointers must all be tensors.
            picked if soft is None else soft,
            labels.column,
            z.stride(0),
            out.stride(0),
            z.shape[1],
            loss.real,
            SMOOTHS=soft is not None,
            WIDE=computed(z.dtype),
            BLOCK=BLOCK,
            num_warps=8,
        )
    return out


def whole_rows_(
    loss: Loss, z: Tensor, labels: Labels, losses: Tensor, factors: tuple[Tensor, Tensor] | None
) -> None:
    """Write the loss terms of every row, 0 where ignored; overwrite the logits z [N, n] with their gradient.

    `losses` [1 or 2, N] gets log S - (z_y - M), and with smoothing the sum over j of log S - (z_j - M).
    `factors` are the weights of those two in the differentiated loss (0-d, in the dtype of the losses); None
    skips the gradient.
    """
    # On CUDA gather fails for an invalid class id, as torch's loss does; the kernel would read out of bounds.
    picked = z.gather(1, labels.column.unsqueeze(1))
    hard, soft = (losses, losses) if factors is None else factors
    if len(z):
        launched(_whole_rows, (len(z),), z)(
            z,
            picked,
            labels.column,
            labels.ignored,
            losses,
            hard,
            soft,
            z.stride(0),
            losses.stride(0),
            loss.real,
            SMOOTHS=bool(loss.smoothing),
            GRADS=factors is not None,
            WIDE=computed(z.dtype),
            BLOCK=BLOCK,
            num_warps=8,
        )


@triton.jit
def _whole_rows(
    z,
    picked,
    target,
    ignored,
    losses,
    hard,
    soft,
    step,
    losses_step,
    real,
    SMOOTHS: tl.constexpr,
    GRADS: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    most, total, values = _sums_of_row(z + row * step, real, WIDE, BLOCK)
    logarithm = tl.log(total)
    counts = tl.load(ignored + row) == 0
    loss = logarithm - (tl.load(picked + row).to(WIDE) - most)
    tl.store(losses + row, tl.where(counts, loss, 0.0))
    if SMOOTHS:
        loss = real * logarithm - (values - real * most)
        tl.store(losses + losses_step + row, tl.where(counts, loss, 0.0))
    if GRADS:
        at_target = tl.where(counts, tl.load(hard), 0.0)
        factor = at_target / total
        if SMOOTHS:
            each = tl.where(counts, tl.load(soft), 0.0)
            factor = (at_target + each * real) / total
        column_of_target = tl.load(target + row)
        for start in range(0, real, BLOCK):
            column = start + tl.arange(0, BLOCK)
            x = tl.load(z + row * step + column, mask=column < real, other=-float("inf")).to(WIDE)
            y = factor * tl.exp(x - most)
            if SMOOTHS:
                y -= each
            y = tl.where(column == column_of_target, y - at_target, y)
            tl.store(z + row * step + column, y.to(z.dtype.element_ty), mask=column < real)


@triton.jit
def _terms(z, maximum, total, weighted, step, real, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    most, sums, values = _sums_of_row(z + row * step, real, WIDE, BLOCK)
    tl.store(maximum + row, most)
    tl.store(total + row, sums)
    tl.store(weighted + row, values)


@triton.jit
def _sums_of_row(z, real, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """Return the maximum m of a row, the sum of exp(z - m), and the sum of z."""
    # Each lane keeps a running maximum and sum; they are merged at the end.
    top = tl.full([BLOCK], -float("inf"), WIDE)
    sums = tl.zeros([BLOCK], WIDE)
    values = tl.zeros([BLOCK], WIDE)
    for start in range(0, real, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < real
        x = tl.load(z + column, mask=inside, other=-float("inf")).to(WIDE)
        new = tl.maximum(top, x)
        # -inf minus itself would be NaN.
        shift = tl.where(new == -float("inf"), 0.0, new)
        sums = sums * tl.exp(top - shift) + tl.exp(x - shift)
        values += tl.where(inside, x, 0.0)
        top = new
    most = tl.max(top, 0)
    shift = tl.where(most == -float("inf"), 0.0, most)
    return most, tl.sum(sums * tl.exp(top - shift), 0), tl.sum(values, 0)


@triton.jit
def _gradients(
    z,
    out,
    maximum,
    factor,
    picked,
    soft,
    target,
    step,
    out_step,
    width,
    real,
    SMOOTHS: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    # `out` may be z: the program that reads an element is the one that writes it.
    x = tl.load(z + row * step + column, mask=column < real, other=-float("inf")).to(WIDE)
    y = tl.load(factor + row) * tl.exp(x - tl.load(maximum + row))
    if SMOOTHS:
        y -= tl.load(soft + row)
    y = tl.where(column == tl.load(target + row), y - tl.load(picked + row), y)
    y = tl.where(column < real, y, 0.0)
    tl.store(out + row * out_step + column, y.to(out.dtype.element_ty), mask=column < width)
