"""A value that was gathered from the shards of tensor ranks, for GEMMs that keep the shards only and gather them again.

In: this rank's shard. Out: the whole value, of which autograd saves nothing: backward of `rt.linear` gathers the shards
once more for its weight's gradient (Korthikanti et al. 2022, section 4.2.2: the input of a column-split GEMM is saved as
its shard). All readers share one such gather.

    ln_1 = rt.gathered(ln_1, tp, dim=1, outer=1, readers=3, site="h.0.attn")      # S -> R
    q, k, v = rt.linear(ln_1, w.q), rt.linear(ln_1, w.k), rt.linear(ln_1, w.v)
"""

from __future__ import annotations

import torch

from autoptd.errors import InternalError
from autoptd.runtime.conversions import gather, s_to_r
from autoptd.runtime.world import Group

Tensor = torch.Tensor


class Again:
    """Gathers shards for backward at the first of `readers` calls, and forgets the whole value at the last."""

    def __init__(self, shard: Tensor, group: Group, dim: int, outer: int, readers: int, site: str) -> None:
        self._shard, self._group, self._at, self._site = shard.detach(), group, (dim, outer), site
        self._left = readers
        self._whole: Tensor | None = None

    def take(self) -> Tensor:
        """Return the whole value; every reader calls once."""
        if not self._left:
            raise InternalError(self._site, "more readers gather again than were counted")
        if self._whole is None:
            self._whole = gather(self._shard, self._group, *self._at, site=f"{self._site} backward")
        self._left -= 1
        whole = self._whole
        if not self._left:
            self._whole = None
        return whole


class Gathered:
    """The whole value `x` of the forward, and `again`, which makes it once more in backward (None: x itself is kept)."""

    def __init__(self, x: Tensor, again: Again | None) -> None:
        self.x, self.again = x, again

    def reshape(self, *sizes: int) -> Gathered:
        """Fold the leading dims, as `Tensor.reshape`."""
        return Gathered(self.x.reshape(*sizes), self.again)


def gathered(x: Tensor, group: Group, dim: int, outer: int, *, readers: int, site: str = "") -> Gathered:
    """Turn the shard `x` into the whole value: S -> R, for `rt.linear` only; `readers` of them have a weight gradient.

    Forward: all-gather. Backward: all-gather again, reduce-scatter. See `s_to_r` for `dim` and `outer`.
    """
    keeps_shard = group.size > 1 and readers > 0 and torch.is_grad_enabled()
    again = Again(x, group, dim, outer, readers, site) if keeps_shard else None
    return Gathered(s_to_r(x, group, dim, outer, site=site), again)
