"""Draw this rank's part of the random numbers of a global value, like the masks of dropout (see
`dropout.py`).

In: this rank's part of a value (only its shape and dtype are read), and its place. Out: the numbers at that
place.

    noise = uniform(x, self.draw(site=7), batch=0, shard=(2, 1), group=tp)
"""

from __future__ import annotations

from functools import partial

import torch

from autoptd.errors import InternalError
from autoptd.kernels.noise import draw as draw_numbers
from autoptd.runtime.ops.dropout import Cut, Draw, where
from autoptd.runtime.world.world import Group


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
        raise InternalError("noise", "is drawn in an evaluation")
    x = x.detach()
    size, places = where(x, draw, batch, shard, group)
    return draw_numbers(kind, size, places, x.dtype, x.device).view(x.shape)


uniform = partial(_noise, "uniform")
normal = partial(_noise, "normal")
exponential = partial(_noise, "exponential")
