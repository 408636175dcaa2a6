"""Implement dropout in Triton, alone or fused with bias and residual, bit-identical to the torch form.

One pass over the value. A program takes the same columns of row after row, so it divides program ids, not
element indices.

Imported only where there are a GPU and Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from autoptd.kernels.dropout_mask import Places, signed, threshold
from autoptd.kernels.rows_triton import ceil_div, divided, launched, passes

# Elements of a row per iteration of a program.
SIZE = 1024
# Programs that are enough to fill a GPU.
PROGRAMS = 4096
# More columns than these are numbered in 64 bits.
LARGE = 2**31 - SIZE


def drop_triton(
    x: torch.Tensor, rate: float, places: Places, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Zero the masked elements of x [before, rows, after] and scale the others by 1 / (1 - rate).

    Writes to `out` if given: contiguous, possibly x itself.
    """
    x = x.contiguous()
    return _run(x, None, None, rate, places, torch.empty_like(x) if out is None else out)


def bias_dropout_add_forward(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    rate: float,
    places: Places | None,
    size: tuple[int, int, int],
) -> torch.Tensor:
    """Return residual + drop(x + bias), of x seen as `size` = [before, rows, after]: see `kernels/dropout.py`."""
    x, residual = x.contiguous(), residual.contiguous()
    bias = None if bias is None else bias.contiguous()
    return _run(
        x.view(size), bias, residual, rate, places, torch.empty(size, dtype=x.dtype, device=x.device)
    ).view(x.shape)


def _run(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    rate: float,
    places: Places | None,
    out: torch.Tensor,
) -> torch.Tensor:
    if not x.numel():
        return out
    before, rows, after = x.shape
    # A 1-d bias runs along the rows.
    if bias is not None and after % len(bias):
        x, bias = (x.view(-1, len(bias)) + bias).view(x.shape), None
    where = places or Places(0, 0)
    columns, block = before * after, where.block or before * after
    chunks = ceil_div(after, SIZE)
    # A program hashes its columns once for all its rows; it takes fewer rows where programs would be few.
    at_once = min(rows, max(1, PROGRAMS // (chunks * before)))
    launched(_drop, (chunks * before, at_once), x)(
        x,
        x if bias is None else bias,
        x if residual is None else residual,
        out,
        rows,
        after,
        chunks,
        1 if bias is None else len(bias),
        block,
        where.degree,
        where.index,
        where.first_row,
        signed(where.row_key),
        signed(where.column_key),
        0 if places is None else threshold(rate),
        SCALE=1.0 if places is None else 1.0 / (1.0 - rate),
        HAS_MASK=places is not None,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        BLOCKS=passes(block, columns, SIZE),
        BIASES=0 if bias is None else passes(len(bias), after, SIZE),
        IS_HALF=x.element_size() == 2,
        IS_LARGE=columns > LARGE,
        IS_ONE=before == 1,
        SIZE=SIZE,
    )
    return out


# One compilation serves all values of these.
NOT_SPECIAL = ["rows", "chunks", "degree", "index", "first_row", "row_key", "column_key", "least"]


@triton.jit(do_not_specialize=NOT_SPECIAL)
def _drop(
    x,
    bias,
    residual,
    out,
    rows,
    after,
    chunks,
    width,
    block,
    degree,
    index,
    first_row,
    row_key,
    column_key,
    least,
    SCALE: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BLOCKS: tl.constexpr,
    BIASES: tl.constexpr,
    IS_LARGE: tl.constexpr,
    IS_HALF: tl.constexpr,
    IS_ONE: tl.constexpr,
    SIZE: tl.constexpr,
):
    chunk = tl.program_id(0)
    a = chunk * 0
    if not IS_ONE:
        a = chunk // chunks
        chunk = chunk % chunks
    if IS_LARGE:
        chunk = chunk.to(tl.int64)
        a = a.to(tl.int64)
    lane = tl.arange(0, SIZE)
    z = chunk * SIZE + lane
    inside = z < after
    if HAS_BIAS:
        _, place = divided(chunk * SIZE, lane, width, BIASES)
        added = tl.load(bias + place, mask=inside)
    if HAS_MASK:
        blocks, place = divided(a * after + chunk * SIZE, lane, block, BLOCKS)
        # Modulo 2**32: only sums and products of this follow.
        column = blocks * block * degree + index * block + place
        hashed = _premix(column, column_key)
    first = a.to(tl.int64) * rows
    for row in range(tl.program_id(1), rows, tl.num_programs(1)):
        at = (first + row) * after + z
        value = tl.load(x + at, mask=inside)
        # As torch does: one rounding, at the end.
        if IS_HALF:
            value = value.to(tl.float32)
        if HAS_BIAS:
            value += added.to(value.dtype)
        if HAS_MASK:
            bits = _mix(_premix(row + first_row, row_key) ^ hashed)
            kept = bits.to(tl.int32, bitcast=True) >= least
            # 0 times NaN is NaN.
            value = value * kept.to(value.dtype) * SCALE
        if HAS_RESIDUAL:
            value += tl.load(residual + at, mask=inside).to(value.dtype)
        tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _premix(numbers, key):
    h = numbers.to(tl.uint32) ^ key.to(tl.uint32, bitcast=True)
    h ^= h >> 16
    h = _mix(h)
    return h ^ (h >> 16)


@triton.jit
def _mix(h):
    h *= 0x7FEB352D
    h ^= h >> 15
    return h * 0x846CA68B
