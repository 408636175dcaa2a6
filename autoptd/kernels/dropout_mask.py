"""Compute the inputs of a dropout mask: its keys, the global positions of the local elements, the threshold.

In: seed, step and site, and the position of a shard in the global value. Out: integers that `dropout` and
`dropout_triton` hash (`dropout` has the formula).

    places = Places(*keys(seed=0, step=3, site=7), first_row=16)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from autoptd.errors import InternalError

WORD = 1 << 32


class Shard(NamedTuple):
    """Describe which columns a rank has: blocks of `block`, each of them part `part` of `degree`.

    With `is_zigzag` a block has two halves: pieces `part` and 2 * degree - 1 - part of 2 * degree.
    """

    block: int
    degree: int
    part: int
    is_zigzag: bool = False


@dataclass(frozen=True)
class Places:
    """Map local elements to elements of the global value, and hold the keys of the mask.

    Row i of the local value is global row `first_row + i`. Columns are all other dims, numbered in order. A
    shard has blocks of `block` columns, each of them the `index`-th of `degree` (`block` = 0: all columns are
    local), or two pieces of it (`is_zigzag`). `around` lists the shards along further axes, innermost first;
    the blocks of each are counted in columns of the shards inside it, put together.
    """

    row_key: int
    column_key: int
    first_row: int = 0
    block: int = 0
    degree: int = 1
    index: int = 0
    is_zigzag: bool = False
    around: tuple[Shard, ...] = ()

    @property
    def shards(self) -> tuple[Shard, ...]:
        """All shards, innermost first."""
        own = (Shard(self.block, self.degree, self.index, self.is_zigzag),) if self.block else ()
        return own + self.around

    @property
    def has_zigzag(self) -> bool:
        return any(shard.is_zigzag for shard in self.shards)

    @property
    def is_simple(self) -> bool:
        """Whether the shards are equal chunks of one axis, the only layout that the CUDA kernels number."""
        return not self.around and not self.has_zigzag


def keys(seed: int, step: int, site: int) -> tuple[int, int]:
    """Mix seed, step and site into two 32-bit keys for one dropout of one step, as SplitMix64 does."""
    key = 0
    for part in (seed, step, site):
        # One round per number, so that (0, 1, 2) and (2, 1, 0) give unrelated keys.
        key = (key ^ part) + 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
        key = (key ^ key >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        key = (key ^ key >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
        key ^= key >> 31
    return key >> 32, key & 0xFFFFFFFF


def threshold(rate: float) -> int:
    """Return the least int32 that is kept: a fraction `rate` of the 2**32 values is below it."""
    if not 0.0 < rate < 1.0:
        raise InternalError(f"dropout of {rate}", "is not between 0 and 1")
    # Shifted by 2**31, as int32 are compared; WORD itself, for a rate close to 1, would not fit.
    return min(round(rate * WORD), WORD - 1) - (WORD >> 1)


def signed(word: int) -> int:
    """Return a word of 32 bits as an int32."""
    return word - WORD if word >= WORD >> 1 else word
