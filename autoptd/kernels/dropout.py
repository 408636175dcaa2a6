"""Dropout whose mask is a function of numbers: two keys, and the global row and column of every element.

    bits = mix(premix(row, row_key) ^ premix(column, column_key));  kept are bits >= (rate - 1/2) * 2**32

`premix` and `mix` are integer hashes of 32 bits: products with odd numbers and xor-shifts (those of C. Wellons' public search
for the smallest bias). Rows and columns are hashed once each and broadcast, so that one `mix` is left for every element. All
numbers are int32 that wrap around, and all comparisons integer ones: the mask is the same on every device and for every dtype.

In: a value as [before, rows, after], its rows in the middle. Out: kept elements / (1 - rate), zeros elsewhere. No mask is
stored: backward calls the same function on the gradient.

    y = drop(x, 0.1, Places(*keys(seed=0, step=3, site=7), first_row=16))
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from autoptd.errors import InternalError

MULTIPLIER_1, MULTIPLIER_2 = 0x7FEB352D, 0x846CA68B - (1 << 32)  # both odd, as int32
TILE = 1 << 15  # elements that are worked on at a time: four buffers of this size stay in a core's cache
WORD = 1 << 32


@dataclass(frozen=True)
class Places:
    """Which elements of the global value the local ones are, and the keys of its mask.

    Row i of the local value is global row `first_row + i`. Columns are numbered through everything but the rows, in order; of
    them a shard has blocks of `block`, every one the `index`-th of `degree` (`block` = 0: all columns are here).
    """

    row_key: int
    column_key: int
    first_row: int = 0
    block: int = 0
    degree: int = 1
    index: int = 0


def keys(seed: int, step: int, site: int) -> tuple[int, int]:
    """Two keys of 32 bits for one dropout of one step: 64-bit mixing (that of SplitMix64) of the three numbers."""
    key = 0
    for part in (seed, step, site):
        key = (key ^ part) + 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
        key = (key ^ key >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        key = (key ^ key >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
        key ^= key >> 31
    return key >> 32, key & 0xFFFFFFFF


def drop(x: torch.Tensor, rate: float, places: Places) -> torch.Tensor:
    """Return x [before, rows, after] with the elements of its mask zeroed and the others scaled by 1 / (1 - rate)."""
    if x.is_cuda and has_triton():
        from autoptd.kernels.dropout_triton import drop_triton

        return drop_triton(x, rate, places)
    return drop_torch(x, rate, places)


def drop_torch(x: torch.Tensor, rate: float, places: Places) -> torch.Tensor:
    """`drop` by torch operators, in place and tile by tile."""
    x = x.contiguous()
    out = torch.empty_like(x)
    rows = premix(_wrapped(torch.arange(x.shape[1], device=x.device) + places.first_row), places.row_key)
    before, after = (_wrapped(one) for one in column_numbers(x.shape[0], x.shape[2], places, x.device))
    least, scale = threshold(rate), 1.0 / (1.0 - rate)
    bits = torch.empty(min(TILE, x.numel()), dtype=torch.int32, device=x.device)
    shifted = torch.empty_like(bits)
    for a, z, blocks in _tiles(x.shape):
        columns = premix(before[a, None] + after[None, z], places.column_key)[:, None]
        for r in blocks:
            part = x[a, r, z]
            h, spare = (buffer[: part.numel()].view(part.shape) for buffer in (bits, shifted))
            torch.bitwise_xor(rows[r, None], columns, out=h)
            mix_(h, spare)
            h.ge_(least)
            torch.mul(part, h, out=out[a, r, z]).mul_(scale)
    return out


def threshold(rate: float) -> int:
    """The least int32 that is kept: of 2**32 values, `rate` of them are below."""
    if not 0.0 < rate < 1.0:
        raise InternalError(f"dropout of {rate}", "is not between 0 and 1")
    return min(round(rate * WORD), WORD - 1) - (WORD >> 1)


def column_numbers(before: int, after: int, places: Places, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Two vectors whose sum [before, 1] + [1, after] numbers the columns of the global value."""
    block, degree = places.block or before * after, places.degree
    if block >= after:  # a block holds whole runs of the columns that lie after the rows
        first, second = _spread(before, block // after, degree, device) * after, torch.arange(after, device=device)
    else:
        first = torch.arange(before, device=device) * (after * degree)
        second = _spread(after, block, degree, device)
    return first + places.index * block, second


def premix(numbers: torch.Tensor, key: int) -> torch.Tensor:
    """Hash int32 numbers with a key; each key gives a one-to-one map."""
    h = numbers ^ signed(key)
    spare = torch.empty_like(h)
    _xor_shift_(h, 16, spare)
    mix_(h, spare)
    return _xor_shift_(h, 16, spare)


def mix_(h: torch.Tensor, spare: torch.Tensor) -> torch.Tensor:
    """The hash of every element, in place; `spare` is a buffer of the same size."""
    h.mul_(MULTIPLIER_1)
    _xor_shift_(h, 15, spare)
    return h.mul_(MULTIPLIER_2)


def _xor_shift_(h: torch.Tensor, by: int, spare: torch.Tensor) -> torch.Tensor:
    """h ^= h >> by, bits moving in as zeros (int32 shifts copy the sign)."""
    torch.bitwise_right_shift(h, by, out=spare)
    spare.bitwise_and_((1 << (32 - by)) - 1)
    return h.bitwise_xor_(spare)


def _tiles(size: torch.Size) -> Iterator[tuple[slice, slice, list[slice]]]:
    """Slices (before, after, rows) of tiles of at most TILE elements; a tile's columns are hashed once for all its rows."""
    count, rows, after = size
    width = max(min(after, TILE // max(1, min(rows, 64))), min(after, 512), 1)
    height = max(1, TILE // max(1, width * rows))
    depth = max(1, TILE // (width * height))
    for a in range(0, count, height):
        for z in range(0, after, width):
            yield slice(a, a + height), slice(z, z + width), [slice(r, r + depth) for r in range(0, rows, depth)]


def _spread(count: int, block: int, degree: int, device: torch.device) -> torch.Tensor:
    """The numbers of `count` places that lie in blocks of `block`, one block of each `degree`."""
    whole = torch.arange(count // block, device=device) * (block * degree)
    return (whole[:, None] + torch.arange(block, device=device)).flatten()


def _wrapped(numbers: torch.Tensor) -> torch.Tensor:
    """As int32, modulo 2**32."""
    return numbers.to(torch.int32)


def signed(word: int) -> int:
    """A word of 32 bits as an int32."""
    return word - WORD if word >= WORD >> 1 else word


@functools.cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
