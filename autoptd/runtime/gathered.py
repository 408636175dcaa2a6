"""A value that was gathered from the shards of tensor ranks, for GEMMs that keep the shards only and gather them again.

In: this rank's shard. Out: the whole value, of which autograd saves nothing: backward of `rt.linear` gathers the shards
once more for its weight's gradient (Korthikanti et al. 2022, section 4.2.2: the input of a column-split GEMM is saved as
its shard). All readers share one such gather.

    ln_1 = rt.gathered(ln_1, tp, dim=1, readers=3, site="h.0.attn")      # S -> R
    q, k, v = rt.linear(ln_1, w.q), rt.linear(ln_1, w.k), rt.linear(ln_1, w.v)

With `overlap=True` the shards are gathered again while the input's gradient is computed; and where one GEMM alone reads the
value, it reduce-scatters this gradient itself, while the weight's is computed.
"""

from __future__ import annotations

import torch

from autoptd.errors import InternalError
from autoptd.ir.types import Outer
from autoptd.runtime.conversions import gather, gather_start, s_to_r, scatter_start
from autoptd.runtime.world.world import Group, Pending

Tensor = torch.Tensor


class Again:
    """Gathers shards for backward at the first of `readers` calls, and forgets the whole value at the last.

    `overlap`: at the first `start`, which goes on while others compute.
    """

    def __init__(
        self,
        shard: Tensor,
        group: Group,
        dim: int,
        blocks: Outer,
        readers: int,
        site: str,
        overlap: bool = False,
    ) -> None:
        self._shard, self._group, self._at, self._site = shard.detach(), group, (dim, blocks), site
        self._left, self._overlap = readers, overlap
        self._pending: Pending | None = None
        self._whole: Tensor | None = None

    def start(self) -> None:
        """A reader will call `take` soon."""
        if self._overlap and self._whole is None and self._pending is None:
            self._pending = gather_start(self._shard, self._group, *self._at, site=f"{self._site} backward")

    def take(self) -> Tensor:
        """Return the whole value; every reader calls once."""
        if not self._left:
            raise InternalError(self._site, "more readers gather again than were counted")
        if self._pending is not None:
            self._whole, self._pending = self._pending.wait(), None
        elif self._whole is None:
            self._whole = gather(self._shard, self._group, *self._at, site=f"{self._site} backward")
        self._left -= 1
        whole = self._whole
        if not self._left:
            self._whole = None
        return whole

    def reduce_start(self, grad: Tensor) -> Pending:
        """Start to reduce-scatter the gradient of the whole value, folded as it may be."""
        sizes = list(self._shard.shape)
        sizes[self._at[0]] *= self._group.size
        return scatter_start(grad.view(sizes), self._group, *self._at, site=f"{self._site} backward")


class Gathered:
    """The whole value `x` of the forward, and `again`, which makes it once more in backward (None: x itself is kept).

    `shard`: what the gradient goes to, where the one GEMM that reads `x` reduces it.
    """

    def __init__(self, x: Tensor, again: Again | None, shard: Tensor | None = None) -> None:
        self.x, self.again, self.shard = x, again, shard

    def reshape(self, *sizes: int) -> Gathered:
        """Fold the leading dims, as `Tensor.reshape`."""
        return Gathered(self.x.reshape(*sizes), self.again, self.shard)


def gathered(
    x: Tensor,
    group: Group,
    dim: int,
    blocks: Outer = 1,
    *,
    readers: int,
    overlap: bool = False,
    site: str = "",
) -> Gathered:
    """Turn the shard `x` into the whole value: S -> R, for `rt.linear` only; `readers` of them have a weight gradient.

    Forward: all-gather. Backward: all-gather again, reduce-scatter. See `s_to_r` for `dim` and `blocks`. `overlap` with one
    reader says that no other GEMM reads the value.
    """
    if group.size == 1 or not readers or not torch.is_grad_enabled():
        return Gathered(s_to_r(x, group, dim, blocks, site=site), None)
    again = Again(x, group, dim, blocks, readers, site, overlap)
    if overlap and readers == 1:
        return Gathered(gather(x.detach(), group, dim, blocks, site=site), again, x)
    return Gathered(s_to_r(x, group, dim, blocks, site=site), again)
