"""Counter-based random numbers, from the same hashes of keys and positions as dropout masks.

In: a size [before, rows, after] as in `dropout`, and places. Out: numbers of that size. A 32-bit word gives
the same number in every dtype, except for rounding: uniform numbers use 24 of its bits (11 in float16, 8 in
bfloat16: rounded down, so below 1); the other kinds use 23 and a half, so that 0 and 1 never occur.

    u = draw("uniform", (1, 4, 16), Places(*keys(seed=0, step=3, site=7)), torch.float32, device)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from autoptd.kernels.dropout import column_numbers, mix_, premix_
from autoptd.kernels.dropout_mask import Places, signed

# Bits of precision below 1.
UNIFORM_BITS = {torch.float16: 11, torch.bfloat16: 8}


def draw(
    kind: str, size: tuple[int, int, int], places: Places, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return numbers of `kind` ("uniform", "normal", "exponential") of this size."""
    words = _words(size, places, device)
    if kind == "uniform":
        bits = UNIFORM_BITS.get(dtype, 24)
        return _shifted(words, bits).to(_wide(dtype)).add_(1 << (bits - 1)).mul_(2.0**-bits).to(dtype)
    # In the open interval (-1, 1): 24 bits, which float32 can hold.
    centred = _shifted(words, 23).to(_wide(dtype)).add_(0.5).mul_(2.0**-22)
    if kind == "normal":
        return torch.erfinv(centred).mul_(math.sqrt(2.0)).to(dtype)
    return centred.add_(1.0).mul_(0.5).log_().neg_().to(dtype)


def _words(size: tuple[int, int, int], places: Places, device: torch.device) -> Tensor:
    """Return the hash of every element, as int32."""
    before, rows, after = size
    row = torch.arange(places.first_row, places.first_row + rows, device=device).to(torch.int32)
    row.bitwise_xor_(signed(places.row_key))
    column = column_numbers(slice(0, before), slice(0, after), torch.Size(size), places, device)
    column = column.bitwise_xor_(signed(places.column_key))
    words = premix_(row)[:, None] ^ premix_(column)[:, None]
    return mix_(words, torch.empty_like(words))


def _shifted(words: Tensor, bits: int) -> Tensor:
    """Return the first `bits` bits as signed numbers."""
    return words.bitwise_right_shift_(32 - bits)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
