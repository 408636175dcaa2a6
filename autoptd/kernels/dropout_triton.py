"""`kernels.dropout.drop` for CUDA, in Triton: one pass over the value, the same bits as the form in torch.

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
    out = torch.empty_like(x) if out is None else out
    before, rows, after = x.shape
    block = places.block or before * after
    grid = (triton.cdiv(x.numel(), SIZE),)
    _drop[grid](
        x,
        out,
        x.numel(),
        rows,
        after,
        block,
        places.degree,
        places.index,
        places.first_row,
        signed(places.row_key),
        signed(places.column_key),
        threshold(rate),
        SCALE=1.0 / (1.0 - rate),
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
    out,
    count,
    rows,
    after,
    block,
    degree,
    index,
    first_row,
    row_key,
    column_key,
    least,
    SCALE: tl.constexpr,
    IS_LARGE: tl.constexpr,
    IS_HALF: tl.constexpr,
    SIZE: tl.constexpr,
):
    start = tl.program_id(0)
    if IS_LARGE:
        start = start.to(tl.int64)
    at = start * SIZE + tl.arange(0, SIZE)
    row = at // after % rows
    column = at // after // rows * after + at % after
    column = (
        column // block * block * degree + index * block + column % block
    )  # modulo 2**32: only sums and products follow
    bits = _mix(_premix(row + first_row, row_key) ^ _premix(column, column_key))
    kept = bits.to(tl.int32, bitcast=True) >= least
    value = tl.load(x + at, mask=at < count)
    if IS_HALF:  # as torch does: one rounding, at the end
        value = value.to(tl.float32)
    value = value * kept.to(value.dtype) * SCALE  # 0 times NaN is NaN
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
