"""Draw this rank's part of random numbers of a global value: dropout and its mask, and the numbers of `uniform` and others.

In: this rank's part of a value (for numbers, only its shape and dtype are read), and which mask it draws. Out: the value
after dropout, or the numbers. A mask is a function of (seed, step, call site, global row, global column), row along the
batch, column through all other dims. So the ranks and microbatches of every layout draw parts of the same masks, and
backward draws them again: none is saved.

    drawing = Drawing(seed=0, step=3, first_row=16, rows=4)               # this microbatch
    y = dropout(x, 0.1, drawing.draw(site=7), batch=0, shard=(2, 1), group=tp)
    noise = uniform(x, drawing.draw(site=8), batch=0, shard=(2, 1), group=tp)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from autoptd.errors import InternalError
from autoptd.ir.types import Zigzag
from autoptd.kernels import dropout as kernel
from autoptd.kernels.dropout_mask import Places, Shard, keys
from autoptd.runtime.world.world import Group

# Where a value is cut: a dim, and the elements of that dim before the atom that is cut, as a `Zigzag` in that order.
Cut = tuple[int, int | Zigzag]


@dataclass(frozen=True)
class Draw:
    """The mask of one call site for one microbatch: `rows` rows of the global batch, from `first_row` on."""

    seed: int
    step: int
    site: int
    first_row: int
    rows: int


@dataclass(frozen=True)
class Drawing:
    """The masks that a microbatch of a step draws, for all call sites."""

    seed: int
    step: int
    first_row: int
    rows: int

    def draw(self, site: int) -> Draw:
        return Draw(self.seed, self.step, site, self.first_row, self.rows)


def dropout(
    x: torch.Tensor,
    rate: float,
    draw: Draw | None,
    batch: int | tuple[int, int] | None = None,
    shard: Cut | tuple[Cut, ...] | None = None,
    group: Group | tuple[Group, ...] | None = None,
) -> torch.Tensor:
    """Zero elements of x by the mask of `draw` and scale the others by 1 / (1 - rate); without a draw return x itself.

    `batch` is where x has the rows of the batch: a dim, or (dim, elements of that dim before the rows); None: nowhere,
    and its mask is that of row 0. `shard` says in the same form where x is split over the ranks of `group` (see
    `shards.py`); of several axes both are tuples, the outermost cut first.
    """
    if draw is None:
        return x
    size, places = where(x, draw, batch, shard, group)
    return _Dropped.apply(x, rate, size, places)  # type: ignore[no-any-return, no-untyped-call]


def bias_dropout_add(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    rate: float,
    draw: Draw | None,
    batch: int | tuple[int, int] | None = None,
    shard: Cut | tuple[Cut, ...] | None = None,
    group: Group | tuple[Group, ...] | None = None,
    *,
    backend: str = "eager",
) -> torch.Tensor:
    """Return residual + dropout(x + bias, rate, draw, batch, shard, group) in one operator: see `kernels/dropout.py`."""
    size, places = (None, None) if draw is None else where(x, draw, batch, shard, group)
    return kernel.bias_dropout_add(x, bias, residual, rate=rate, places=places, size=size, backend=backend)


def where(
    x: torch.Tensor,
    draw: Draw,
    batch: int | tuple[int, int] | None,
    shard: Cut | tuple[Cut, ...] | None,
    group: Group | tuple[Group, ...] | None,
) -> tuple[tuple[int, int, int], Places]:
    """Return x's shape as [before, rows, after], and the places of its elements in the mask of `draw`: see `dropout`."""
    if batch is None:
        # All of x counts as global row 0, whatever the microbatch or replica.
        before, rows, first_row = 1, 1, 0
    else:
        batch = (batch, 1) if isinstance(batch, int) else batch
        before, rows, first_row = math.prod(x.shape[: batch[0]]) * batch[1], draw.rows, draw.first_row
    size = (before, rows, x.numel() // (before * rows))
    innermost, *around = _shards(x, rows, batch, shard, group) or [Shard(0, 1, 0)]
    named = keys(draw.seed, draw.step, draw.site)
    block, degree, part, is_zigzag = innermost
    return size, Places(*named, first_row, block, degree, part, is_zigzag, tuple(around))


def _shards(
    x: torch.Tensor,
    rows: int,
    batch: tuple[int, int] | None,
    shard: Cut | tuple[Cut, ...] | None,
    group: Group | tuple[Group, ...] | None,
) -> list[Shard]:
    """Return the shards of x, innermost first."""
    if shard is None or group is None:
        return []
    groups = group if isinstance(group, tuple) else (group,)
    cuts: tuple[Any, ...] = shard if isinstance(group, tuple) else (shard,)
    found: list[Shard] = []
    for (dim, outer), ranks in reversed(list(zip(cuts, groups, strict=True))):
        entries = outer.blocks if isinstance(outer, Zigzag) else outer
        if ranks.size == 1:
            continue
        # Within a row, x is `blocks` blocks of `block` elements; in the global value each is `degree` times
        # as long. Attention weights [b, heads / t, s, s] that are split at (1, 1) have one block, of heads /
        # t * s * s.
        blocks = math.prod(x.shape[:dim]) * entries
        if batch is not None and batch < (dim, entries):
            # The product above has counted the rows too, where they come before the split.
            blocks //= rows
        # As long as the shards within make it.
        longer = math.prod(inner.degree for inner in found)
        block = x.numel() // rows // blocks * longer
        found.append(Shard(block, ranks.size, ranks.index, isinstance(outer, Zigzag)))
    return found


class _Dropped(torch.autograd.Function):
    """Dropout whose backward draws the same mask again."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, rate: float, size: tuple[int, int, int], places: Places
    ) -> torch.Tensor:
        ctx.how = rate, size, places
        return kernel.drop(x.reshape(size), rate, places).view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        rate, size, places = ctx.how
        # The mask is linear: the gradient is masked and scaled like the value.
        return kernel.drop(grad.reshape(size), rate, places).view(grad.shape), None, None, None


def _noise(
    kind: str,
    x: torch.Tensor,
    draw: Draw | None,
    batch: int | tuple[int, int] | None = None,
    shard: Cut | tuple[Cut, ...] | None = None,
    group: Group | tuple[Group, ...] | None = None,
) -> torch.Tensor:
    """Return numbers of `kind` of the shape and dtype of x; other keywords are those of `dropout`."""
    if draw is None:
        raise InternalError("noise", "cannot be drawn in an evaluation")
    x = x.detach()
    size, places = where(x, draw, batch, shard, group)
    return kernel.draw(kind, size, places, x.dtype, x.device).view(x.shape)


uniform = partial(_noise, "uniform")
normal = partial(_noise, "normal")
exponential = partial(_noise, "exponential")
