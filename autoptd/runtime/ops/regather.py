"""Gather the shards of tensor ranks for GEMMs that save only the shard and gather it again in backward.

In: this rank's shard. Out: the whole value, which autograd does not save: the backward of `rt.linear` gathers
the shards again for its weight's gradient (Korthikanti et al. 2022, section 4.2.2: a column-split GEMM saves
its input as a shard). All GEMMs that use the value share one such gather.

    ln_1 = rt.all_gather_again(ln_1, tp, dim=1, uses=3, site="h.0.attn")      # S -> R
    q, k, v = rt.linear(ln_1, w.q), rt.linear(ln_1, w.k), rt.linear(ln_1, w.v)

With `overlap=True` the shards are gathered again while the input's gradient is computed. A GEMM that is the
only one to use the value also reduce-scatters this gradient itself, while the weight's gradient is computed.
"""

from __future__ import annotations

import torch

from autoptd.errors import InternalError
from autoptd.ir.types import Outer
from autoptd.runtime.ops.conversions import gather, gather_start, s_to_r, scatter_start
from autoptd.runtime.world.world import Group, Pending

Tensor = torch.Tensor


class Regather:
    """The gather of one backward: done at the first of `uses` calls of `take`, its result freed at the last.

    With `overlap`, the first `start` begins the gather, so that it overlaps other work.
    """

    def __init__(
        self,
        shard: Tensor,
        group: Group,
        dim: int,
        blocks: Outer,
        uses: int,
        site: str,
        overlap: bool = False,
    ) -> None:
        # Detached: the second gather needs the values only, and must not keep the graph before it alive.
        self._shard, self._group, self._split, self._site = shard.detach(), group, (dim, blocks), site
        self._uses_left, self._overlap = uses, overlap
        self._pending: Pending | None = None
        self._whole: Tensor | None = None

    def start(self) -> None:
        """Announce that `take` will be called soon."""
        if self._overlap and self._whole is None and self._pending is None:
            self._pending = gather_start(
                self._shard, self._group, *self._split, site=f"{self._site} backward"
            )

    def take(self) -> Tensor:
        """Return the whole value; each use calls this once."""
        if not self._uses_left:
            raise InternalError(self._site, "is gathered again by more GEMMs than were counted")
        if self._pending is not None:
            self._whole, self._pending = self._pending.wait(), None
        elif self._whole is None:
            self._whole = gather(self._shard, self._group, *self._split, site=f"{self._site} backward")
        self._uses_left -= 1
        # The caller's reference is then the last one: its GEMM frees the value.
        whole = self._whole
        if not self._uses_left:
            self._whole = None
        return whole

    def reduce_start(self, grad: Tensor) -> Pending:
        """Start the reduce-scatter of the whole value's gradient, whose leading dims may be folded."""
        # `rt.linear` computes in matrices [rows, h]: back to the dims in which the shard was cut.
        sizes = list(self._shard.shape)
        sizes[self._split[0]] *= self._group.size
        return scatter_start(grad.view(sizes), self._group, *self._split, site=f"{self._site} backward")


class RegatheredInput:
    """The whole value `x` of the forward, and `regather`, which makes it again in backward (None: x itself is saved).

    `shard` is set where a single GEMM uses `x` and reduces the gradient itself: it receives this gradient.
    """

    def __init__(self, x: Tensor, regather: Regather | None, shard: Tensor | None = None) -> None:
        self.x, self.regather, self.shard = x, regather, shard

    def reshape(self, *sizes: int) -> RegatheredInput:
        """Fold the leading dims, as `Tensor.reshape` does."""
        return RegatheredInput(self.x.reshape(*sizes), self.regather, self.shard)


def all_gather_again(
    x: Tensor,
    group: Group,
    dim: int,
    blocks: Outer = 1,
    *,
    uses: int,
    overlap: bool = False,
    site: str = "",
) -> RegatheredInput:
    """Gather the shard `x` (S -> R) for `rt.linear` only; `uses` counts the GEMMs whose weight has a gradient.

    Forward: all-gather. Backward: all-gather again, reduce-scatter. See `s_to_r` for `dim` and `blocks`. `overlap` with
    `uses=1` promises that no other GEMM reads the value.
    """
    # Nothing would be saved, so nothing has to be gathered again.
    if group.size == 1 or not uses or not torch.is_grad_enabled():
        return RegatheredInput(s_to_r(x, group, dim, blocks, site=site), None)
    regather = Regather(x, group, dim, blocks, uses, site, overlap)
    if overlap and uses == 1:
        # Not s_to_r: autograd would wait for its reduce-scatter, while `rt.linear` starts one asynchronously.
        return RegatheredInput(gather(x.detach(), group, dim, blocks, site=site), regather, x)
    return RegatheredInput(s_to_r(x, group, dim, blocks, site=site), regather)
