"""Dropout on one rank: the mask of the global value, whichever part of it is here.

A mask is a function of (seed, step, call site, global row, global column): row along the batch, column through all else. So
the ranks and microbatches of every layout draw parts of the same masks, and backward draws them again: none is kept.

    drawing = Drawing(seed=0, step=3, first_row=16, rows=4)               # this microbatch
    y = dropout(x, 0.1, drawing.draw(site=7), batch=0, shard=(2, 1), group=tp)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from autoptd.kernels import residual as residual_kernel
from autoptd.kernels.dropout import drop
from autoptd.kernels.dropout_mask import Places, keys
from autoptd.runtime.world.world import Group


@dataclass(frozen=True)
class Draw:
    """The masks of one call site for one microbatch: `rows` rows of the global batch, from `first_row` on."""

    seed: int
    step: int
    site: int
    first_row: int
    rows: int


@dataclass(frozen=True)
class Drawing:
    """Which masks a microbatch of a step draws."""

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
    shard: tuple[int, int] | None = None,
    group: Group | None = None,
) -> torch.Tensor:
    """Zero elements of x by the mask of `draw` and scale the others by 1 / (1 - rate); without a draw return x itself.

    `batch` is where x carries the rows: a dim, or (dim, elements of that dim before the rows); None: it carries none, and its
    mask is that of row 0. `shard` says in the same way where x is split over the ranks of `group` (see `shards.py`).
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
    shard: tuple[int, int] | None = None,
    group: Group | None = None,
    *,
    backend: str = "eager",
) -> torch.Tensor:
    """Return residual + dropout(x + bias, rate, draw, batch, shard, group) in one operator: see `kernels.residual`."""
    size, places = (None, None) if draw is None else where(x, draw, batch, shard, group)
    return residual_kernel.bias_dropout_add(
        x, bias, residual, rate=rate, places=places, size=size, backend=backend
    )


def where(
    x: torch.Tensor,
    draw: Draw,
    batch: int | tuple[int, int] | None,
    shard: tuple[int, int] | None,
    group: Group | None,
) -> tuple[tuple[int, int, int], Places]:
    """Return x's [before, rows, after], and the places of its elements in the masks of `draw`: see `dropout`."""
    at = (batch, 1) if isinstance(batch, int) else batch
    rows = draw.rows if at is not None else 1
    before = math.prod(x.shape[: at[0]]) * at[1] if at is not None else 1
    size = (before, rows, x.numel() // (before * rows))
    block, degree, index = 0, 1, 0
    if shard is not None and group is not None and group.size > 1:
        blocks = math.prod(x.shape[: shard[0]]) * shard[1]
        if at is not None and at < shard:
            blocks //= rows
        block, degree, index = x.numel() // rows // blocks, group.size, group.index
    first_row = draw.first_row if at is not None else 0
    return size, Places(*keys(draw.seed, draw.step, draw.site), first_row, block, degree, index)


class _Dropped(torch.autograd.Function):
    """The gradient goes through the same mask: it is drawn again."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, rate: float, size: tuple[int, int, int], places: Places
    ) -> torch.Tensor:
        ctx.how = rate, size, places
        return drop(x.reshape(size), rate, places).view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        rate, size, places = ctx.how
        return drop(grad.reshape(size), rate, places).view(grad.shape), None, None, None
