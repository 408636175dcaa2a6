"""Counter-based dropout: the mask is a hash of two keys and the global row and column of every element.

    bits = mix(premix(row ^ row_key) ^ premix(column ^ column_key));  kept are bits >= (rate - 1/2) * 2**32

`premix` and `mix` are 32-bit integer hashes: multiplications by odd numbers and xor-shifts (constants from C.
Wellons' public search for the smallest bias). Rows and columns are hashed once each and broadcast, so an
element costs one `mix`. All arithmetic is wrapping int32 and all comparisons are on integers: the mask is the
same on every device and for every dtype.

In: a value viewed as [before, rows, after]. Out: kept elements / (1 - rate), zeros elsewhere. The mask is not
stored: backward calls the same function on the gradient. `bias_dropout_add` fuses the end of a block,
residual + dropout(x + bias), in one buffer. `draw` makes numbers from the same hashes.

    y = drop(x, 0.1, Places(*keys(seed=0, step=3, site=7), first_row=16))
    x = bias_dropout_add(F.linear(h, w_proj), b_proj, x, rate=0.1, places=Places(*keys(seed, step, site)))
    u = draw("uniform", (1, 4, 16), Places(*keys(seed=0, step=3, site=7)), torch.float32, device)
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch

from autoptd.errors import InternalError
from autoptd.kernels.dropout_mask import WORD, Places, signed, threshold
from autoptd.kernels.forms import has_triton, takes_triton, wide

# Both odd, as int32.
MULTIPLIER_1, MULTIPLIER_2 = 0x7FEB352D, 0x846CA68B - (1 << 32)
# Elements per tile: enough to amortize the calls, few enough to stay in the caches.
TILE = 1 << 17


def drop(x: torch.Tensor, rate: float, places: Places, out: torch.Tensor | None = None) -> torch.Tensor:
    """Zero the masked elements of x [before, rows, after] and scale the others by 1 / (1 - rate).

    Writes to `out` if given: contiguous, possibly x itself.
    """
    # The kernel can number the shards of one axis only.
    if x.is_cuda and has_triton() and places.is_simple:
        from autoptd.kernels.dropout_triton import drop_triton

        return drop_triton(x, rate, places, out)
    return drop_torch(x, rate, places, out)


def drop_torch(x: torch.Tensor, rate: float, places: Places, out: torch.Tensor | None = None) -> torch.Tensor:
    """Run `drop` with torch operators, in place and tile by tile."""
    x = x.contiguous()
    out = torch.empty_like(x) if out is None else out
    rows = torch.arange(places.first_row, places.first_row + x.shape[1], device=x.device).to(torch.int32)
    rows, column_key = rows.bitwise_xor_(signed(places.row_key)), signed(places.column_key)
    # Hash rows and columns together: small values are bound by the number of calls.
    if x.numel() <= TILE:
        columns = column_numbers(slice(0, x.shape[0]), slice(0, x.shape[2]), x.shape, places, x.device)
        columns = columns.flatten().bitwise_xor_(column_key)
        words = premix_(torch.cat([rows, columns]))
        bits = words[: x.shape[1], None] ^ words[x.shape[1] :].view(x.shape[0], 1, x.shape[2])
        return _keep(x, bits, torch.empty_like(bits), rate, out)
    hashed_rows = premix_(rows)[:, None]
    bits = torch.empty(TILE, dtype=torch.int32, device=x.device)
    spare = torch.empty_like(bits)
    # On the meta device two tiles show the peak memory: later tiles reuse it, and thousands would be slow.
    for a, z, blocks in islice(_tiles(x.shape), 2 if x.is_meta else None):
        columns = column_numbers(a, z, x.shape, places, x.device).bitwise_xor_(column_key)
        hashed_columns = premix_(columns, spare[: columns.numel()].view(columns.shape))[:, None]
        for r in blocks:
            part = x[a, r, z]
            # The last tiles are smaller: views of the two buffers, which all tiles share.
            h, other = (buffer[: part.numel()].view(part.shape) for buffer in (bits, spare))
            torch.bitwise_xor(hashed_rows[r], hashed_columns, out=h)
            _keep(part, h, other, rate, out[a, r, z])
    return out


def _keep(
    x: torch.Tensor, bits: torch.Tensor, spare: torch.Tensor, rate: float, out: torch.Tensor
) -> torch.Tensor:
    """Set out = x / (1 - rate) where the mixed bits reach the threshold, 0 elsewhere."""
    mix_(bits, spare).ge_(threshold(rate))
    # The comparison has left 1 or 0 in `bits`.
    return torch.mul(x, bits, out=out).mul_(1.0 / (1.0 - rate))


def column_numbers(
    before: slice, after: slice, size: torch.Size, places: Places, device: torch.device
) -> torch.Tensor:
    """Return the global numbers [before, after] of columns, by their indices before and after the rows."""
    if not places.has_zigzag:
        numbers = _numbers_before(size, places, device)[before, None]
        return numbers + _numbers_after(after.start, after.stop, size, places, device)
    rows = torch.arange(before.start, min(before.stop, size[0]), device=device)
    found = rows[:, None] * size[2] + torch.arange(after.start, after.stop, device=device)
    for block, degree, part, is_zigzag in places.shards:
        inside = found % block
        first: int | torch.Tensor = part * block
        if is_zigzag:
            # The first half block precedes all columns of the later ranks; the second one follows them.
            first = torch.where(inside < block // 2, part, 2 * degree - 2 - part) * (block // 2)
        found = found // block * (block * degree) + inside + first
    return found.to(torch.int32)


def _numbers_before(size: torch.Size, places: Places, device: torch.device) -> torch.Tensor:
    """Return the global number of the first column of every index before the rows.

    The caller adds `_numbers_after`, modulo 2**32.
    """
    width = size[2]
    found = torch.arange(size[0], device=device) * width
    for block, degree, *_ in places.shards:
        if block < width:
            # Each run of the columns after the rows gets longer.
            found, width = found * degree, width * degree
        # A block holds whole such runs.
        else:
            found += found // block * (block * (degree - 1))
    # Where this rank's blocks begin: last, as the blocks around are longer, and begin at their own multiples.
    return (found + sum(shard.part * shard.block for shard in places.shards)).to(torch.int32)


def _numbers_after(
    start: int, stop: int, size: torch.Size, places: Places, device: torch.device
) -> torch.Tensor:
    """Return the offsets that the indices [start, stop) after the rows add to a column's number."""
    width = size[2]
    if all(shard.block >= width for shard in places.shards) and stop <= WORD >> 1:
        return torch.arange(start, stop, dtype=torch.int32, device=device)
    found = torch.arange(start, stop, device=device)
    for block, degree, *_ in places.shards:
        if block < width:
            found += found // block * (block * (degree - 1))
            width *= degree
    return found.to(torch.int32)


def premix_(h: torch.Tensor, spare: torch.Tensor | None = None) -> torch.Tensor:
    """Hash int32 numbers (with a key: number ^ key) one to one, in place.

    `spare` is a buffer of the same size.
    """
    spare = torch.empty_like(h) if spare is None else spare
    _xor_shift_(h, 16, spare)
    mix_(h, spare)
    return _xor_shift_(h, 16, spare)


def mix_(h: torch.Tensor, spare: torch.Tensor) -> torch.Tensor:
    """Hash every element, in place; `spare` is a buffer of the same size."""
    h.mul_(MULTIPLIER_1)
    _xor_shift_(h, 15, spare)
    return h.mul_(MULTIPLIER_2)


def _xor_shift_(h: torch.Tensor, by: int, spare: torch.Tensor) -> torch.Tensor:
    """Compute h ^= h >> by with a logical shift (shifts of int32 are arithmetic)."""
    torch.bitwise_right_shift(h, by, out=spare)
    spare.bitwise_and_((1 << (32 - by)) - 1)
    return h.bitwise_xor_(spare)


def _tiles(size: torch.Size) -> Iterator[tuple[slice, slice, list[slice]]]:
    """Yield the slices (before, after, rows) of tiles of at most TILE elements.

    A tile's columns are hashed once for all its rows.
    """
    count, rows, after = size
    width = max(min(after, TILE // max(1, min(rows, 64))), min(after, 512), 1)
    height = max(1, TILE // max(1, width * rows))
    depth = max(1, TILE // (width * height))
    for a in range(0, count, height):
        for z in range(0, after, width):
            yield (
                slice(a, a + height),
                slice(z, min(z + width, after)),
                [slice(r, r + depth) for r in range(0, rows, depth)],
            )


# Bits of precision below 1.
UNIFORM_BITS = {torch.float16: 11, torch.bfloat16: 8}


def draw(
    kind: str, size: tuple[int, int, int], places: Places, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return numbers of `kind` ("uniform", "normal", "exponential") of this size, [before, rows, after].

    A 32-bit word gives the same number in every dtype, except for rounding: uniform numbers use 24 of its bits (11 in
    float16, 8 in bfloat16: rounded down, so below 1); the other kinds use 23 and a half, so that 0 and 1 never occur.
    """
    words = _words(size, places, device)
    if kind == "uniform":
        bits = UNIFORM_BITS.get(dtype, 24)
        return _shifted(words, bits).to(wide(dtype)).add_(1 << (bits - 1)).mul_(2.0**-bits).to(dtype)
    # In the open interval (-1, 1): 24 bits, which float32 can hold.
    centred = _shifted(words, 23).to(wide(dtype)).add_(0.5).mul_(2.0**-22)
    if kind == "normal":
        return torch.erfinv(centred).mul_(math.sqrt(2.0)).to(dtype)
    return centred.add_(1.0).mul_(0.5).log_().neg_().to(dtype)


def _words(size: tuple[int, int, int], places: Places, device: torch.device) -> torch.Tensor:
    """Return the hash of every element, as int32."""
    before, rows, after = size
    row = torch.arange(places.first_row, places.first_row + rows, device=device).to(torch.int32)
    row.bitwise_xor_(signed(places.row_key))
    column = column_numbers(slice(0, before), slice(0, after), torch.Size(size), places, device)
    column = column.bitwise_xor_(signed(places.column_key))
    words = premix_(row)[:, None] ^ premix_(column)[:, None]
    return mix_(words, torch.empty_like(words))


def _shifted(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the first `bits` bits as signed numbers."""
    return words.bitwise_right_shift_(32 - bits)


Size = tuple[int, int, int]


def bias_dropout_add(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    *,
    rate: float = 0.0,
    places: Places | None = None,
    size: Size | None = None,
    backend: str = "eager",
) -> torch.Tensor:
    """Return residual + drop(x + bias, rate, places), of x [..., h] and bias [h].

    `size` is [before, rows, after], the view of x that the mask uses; by default the rows are the first dim.
    Without places, or at a rate of 0, nothing is dropped. Nothing is saved for backward: the gradients are the incoming one,
    the masked incoming one, and the sum of that over rows.
    """
    if places is None or rate == 0.0:
        # Normalise to one form of "nothing is dropped".
        rate, places = 0.0, None
    size = size or (1, x.shape[0], x[0].numel())
    dtypes = {each.dtype for each in (x, bias, residual) if each is not None}
    if x.shape != residual.shape or len(dtypes) > 1 or (bias is not None and bias.shape != x.shape[-1:]):
        return bias_dropout_add_plain(x, bias, residual, rate=rate, places=places, size=size)
    # The kernel can number the shards of one axis only.
    triton = takes_triton(backend, x, "bias_dropout_add") and (places is None or places.is_simple)
    # Without a mask only the fused bias of the Triton kernel gains anything over torch's additions.
    if places is None and (bias is None or not triton):
        return residual + x if bias is None else (x + bias).add_(residual)
    return _BiasDropoutAdd.apply(x, bias, residual, rate, places, size, triton)  # type: ignore[no-any-return, no-untyped-call]


def bias_dropout_add_plain(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    *,
    rate: float = 0.0,
    places: Places | None = None,
    size: Size | None = None,
) -> torch.Tensor:
    """Compute `bias_dropout_add` as models spell it; only the mask is ours."""
    x = x if bias is None else x + bias
    if places is not None and rate:
        ones = torch.ones(size or (1, x.shape[0], x[0].numel()), dtype=x.dtype, device=x.device)
        x = x * drop(ones, rate, places).view(x.shape)
    return residual + x


class _BiasDropoutAdd(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor,
        rate: float,
        places: Places | None,
        size: Size,
        triton: bool,
    ) -> torch.Tensor:
        ctx.how, ctx.bias_dtype = (rate, places, size), None if bias is None else bias.dtype
        if triton:
            from autoptd.kernels.dropout_triton import bias_dropout_add_forward

            return bias_dropout_add_forward(x, bias, residual, rate, places, size)
        if places is None:
            raise InternalError("bias_dropout_add", "draws no mask here")
        # x + bias may be overwritten, x may not.
        y = (x if bias is None else x.contiguous() + bias).reshape(size)
        return drop(y, rate, places, out=None if bias is None else y).view(x.shape).add_(residual)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rate, places, size = ctx.how
        dx = db = None
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
            dx = grad if places is None else drop(grad.reshape(size), rate, places).view(grad.shape)
        if dx is not None and ctx.needs_input_grad[1]:
            # The residual gets the incoming gradient unchanged; x and the bias get the masked one.
            db = dx.reshape(-1, dx.shape[-1]).sum(0, dtype=wide(dx.dtype)).to(ctx.bias_dtype)
        return dx, db, grad, None, None, None, None
