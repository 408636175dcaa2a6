"""Attention by torch's fused kernels, where a model spells it as softmax(q k^T * scale + mask) v.

In: q [..., s, k], k and v [..., n, k] with leading dims that broadcast, and a bool mask (True: attend) or one
that is added. What the fused kernels ask for is seen to here: four dims, masks of the dtype of q whose last
dim is contiguous, one mask where there is a causal one besides. Scores are never materialised.

    y = attention(q, k, v, scale=0.125, causal=True)

A row that attends to nothing gives zeros, where the plain form gives NaN. A row that a finite mask hides from
every key has the plain form's value, and not its gradient: torch's kernels take its probabilities to be 1,
for min + log(n) rounds to min.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from autoptd.kernels.softmax import later_keys, masked_softmax_plain

Tensor = torch.Tensor


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    scale: float | None = None,
    causal: bool = False,
    backend: str = "eager",
) -> Tensor:
    """Return softmax(q k^T * scale + mask) v.

    Scale is by default 1 / sqrt(k); causal: query i attends to keys 0 to i.

    `backend` says nothing here: the kernel is torch's own choice.
    """
    # The kernels do not broadcast: k and v may have one head for many of q.
    leading = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    if mask is not None:
        mask = _fitted(mask, q, leading, k.shape[-2], causal)
    q, k, v = (_four_dims(x.expand(*leading, -1, -1)) for x in (q, k, v))
    # torch takes a mask or is_causal, not both: with a mask, `_fitted` has put the causal one into it.
    out = F.scaled_dot_product_attention(q, k, v, mask, scale=scale, is_causal=causal and mask is None)
    return out.view(*leading, *out.shape[-2:])


def attention_plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    scale: float | None = None,
    causal: bool = False,
) -> Tensor:
    """Compute `attention` as models spell it."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return masked_softmax_plain(q @ k.transpose(-1, -2), mask, scale=scale, causal=causal) @ v


def _four_dims(x: Tensor) -> Tensor:
    """x as [batch, heads, s, k]: the fused kernels take no other number of dims."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    if x.ndim > 4:
        return x.reshape(-1, *x.shape[-3:])
    # Dims of one in front.
    return x[(None,) * (4 - x.ndim)] if x.ndim < 4 else x


def _fitted(mask: Tensor, q: Tensor, leading: torch.Size, keys: int, causal: bool) -> Tensor:
    """The mask with that of `causal` in it, expanded to q's dims without a copy but for its last two dims."""
    if mask.dtype not in (torch.bool, q.dtype):
        mask = _narrowed(mask, q.dtype)
    shape = (q.shape[-2], keys)
    if causal:
        mask = mask.expand(*mask.shape[:-2], *shape) if mask.ndim > 1 else mask.expand(shape)
        # Expanded first, as a mask of one row or column has no place for the triangle.
        later = later_keys(mask)
        mask = mask & ~later if mask.dtype == torch.bool else mask.masked_fill(later, -torch.inf)
    # A last dim of one has stride 0 now, and is copied below; the leading dims stay views.
    mask = mask.expand(*mask.shape[:-1], keys)
    if mask.stride(-1) != 1:
        mask = mask.contiguous()
    return _four_dims(mask.expand(*leading, *shape))


def _narrowed(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """The mask in `dtype`: a finite number that has no place in it becomes its least one, not -inf."""
    # finfo(float32).min, the usual mask, is -inf in bfloat16: a row of it would become NaN.
    narrow = mask.to(dtype)
    return narrow.masked_fill(narrow.isneginf() & ~mask.isneginf(), torch.finfo(dtype).min)
