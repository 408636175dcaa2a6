"""Dropout in Triton, alone and with a bias and a residual: one pass over the value, the same bits as the form in torch.

Imported where a GPU and Triton are at hand only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from autoptd.kernels.dropout import Places, signed, threshold

SIZE = 1024  # elements of one program


def drop_triton(x: torch.Tensor, rate: float, places: Places, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return x [before, rows, after] with the elements of its mask zeroed and the others scaled by 1 / (1 - rate).

    The result is `out`, if there is one: contiguous, and x itself may be it.
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
    """Return residual + drop(x + bias), of x seen as `size` = [before, rows, after]: see `kernels.residual`."""
    x, residual = x.contiguous(), residual.contiguous()
    bias = None if bias is None else bias.contiguous()
    return _run(x.view(size), bias, residual, rate, places, torch.empty(size, dtype=x.dtype, device=x.device)).view(
        x.shape
    )


def _run(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    rate: float,
    places: Places | None,
    out: torch.Tensor,
) -> torch.Tensor:
    before, rows, after = x.shape
    where = places or Places(0, 0)
    grid = (triton.cdiv(x.numel(), SIZE),)
    if not x.numel():
        return out
    _drop[grid](
        x,
        x if bias is None else bias,
        x if residual is None else residual,
        out,
        x.numel(),
        rows,
        after,
        1 if bias is None else len(bias),
        where.block or before * after,
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
        IS_HALF=x.element_size() == 2,
        IS_LARGE=x.numel() > 2**31 - SIZE,
        SIZE=SIZE,
    )
    return out


NOT_SPECIAL = [
    "rows",
    "degree",
    "index",
    "first_row",
    "row_key",
    "column_key",
    "least",
]  # compiled once for all of them


@triton.jit(do_not_specialize=NOT_SPECIAL)
def _drop(
    x,
    bias,
    residual,
    out,
    count,
    rows,
    after,
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
    IS_LARGE: tl.constexpr,
    IS_HALF: tl.constexpr,
    SIZE: tl.constexpr,
):
    start = tl.program_id(0)
    if IS_LARGE:
        start = start.to(tl.int64)
    at = start * SIZE + tl.arange(0, SIZE)
    value = tl.load(x + at, mask=at < count)
    if IS_HALF:  # as torch does: one rounding, at the end
        value = value.to(tl.float32)
    if HAS_BIAS:
        value += tl.load(bias + at % width, mask=at < count).to(value.dtype)
    if HAS_MASK:
        row = at // after % rows
        column = at // after // rows * after + at % after
        column = (
            column // block * block * degree + index * block + column % block
        )  # modulo 2**32: only sums and products follow
        bits = _mix(_premix(row + first_row, row_key) ^ _premix(column, column_key))
        kept = bits.to(tl.int32, bitcast=True) >= least
        value = value * kept.to(value.dtype) * SCALE  # 0 times NaN is NaN
    if HAS_RESIDUAL:
        value += tl.load(residual + at, mask=at < count).to(value.dtype)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=at < count)


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
