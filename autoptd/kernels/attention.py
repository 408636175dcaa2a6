"""Run attention that a model spells as softmax(q k^T * scale + mask) v with torch's fused kernels.

In: q [..., s, k], k and v [..., n, k] with leading dims that broadcast, and a bool mask (True: attend) or an
additive one. This module meets the requirements of the fused kernels: four dims, a mask in the dtype of q
with a contiguous last dim, and a causal mask merged into the given one. Scores are never materialised.

    y = attention(q, k, v, scale=0.125, causal=True)

A row that attends to nothing gives zeros, where the plain form gives NaN. A row that a finite mask hides from
every key has the plain form's value but not its gradient: torch's kernels take its probabilities to be 1,
because min + log(n) rounds to min.
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

    `scale` defaults to 1 / sqrt(k). With `causal`, query i attends to keys 0 to i. `backend` is ignored:
    torch picks the kernel.
    """
    # The kernels do not broadcast, but k and v may have one head for several of q.
    leading = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    if mask is not None:
        mask = _fitted(mask, q, leading, k.shape[-2], causal)
    q, k, v = (_four_dims(x.expand(*leading, -1, -1)) for x in (q, k, v))
    # torch takes a mask or is_causal, not both; `_fitted` has merged the causal mask into the given one.
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
    """Return x as [batch, heads, s, k], the only number of dims that the fused kernels take."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    if x.ndim > 4:
        return x.reshape(-1, *x.shape[-3:])
    # Prepend dims of size 1.
    return x[(None,) * (4 - x.ndim)] if x.ndim < 4 else x


def _fitted(mask: Tensor, q: Tensor, leading: torch.Size, keys: int, causal: bool) -> Tensor:
    """Merge the causal mask into `mask` and expand it to q's dims, copying at most its last two dims."""
    if mask.dtype not in (torch.bool, q.dtype):
        mask = _narrowed(mask, q.dtype)
    shape = (q.shape[-2], keys)
    if causal:
        mask = mask.expand(*mask.shape[:-2], *shape) if mask.ndim > 1 else mask.expand(shape)
        # Expand first: a mask of one row or column cannot hold the triangle.
        later = later_keys(mask)
        mask = mask & ~later if mask.dtype == torch.bool else mask.masked_fill(later, -torch.inf)
    # A last dim of size 1 now has stride 0 and is copied below; the leading dims stay views.
    mask = mask.expand(*mask.shape[:-1], keys)
    if mask.stride(-1) != 1:
        mask = mask.contiguous()
    return _four_dims(mask.expand(*leading, *shape))


def _narrowed(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast the mask to `dtype`; a finite number below its range becomes its minimum, not -inf."""
    # finfo(float32).min, the usual mask value, is -inf in bfloat16: a row of it would become NaN.
    narrow = mask.to(dtype)
    return narrow.masked_fill(narrow.isneginf() & ~mask.isneginf(), torch.finfo(dtype).min)
