"""Fuse rotary position embedding, x * cos + rotate(x) * sin, in one buffer.

In: x [..., k], cos and sin that broadcast to [..., r] with r <= k; elements past r pass through. `rotate` maps
pairs (a, b) to (-b, a): pairs from the two halves of r, or of neighbours (`interleaved`). Saved for backward:
cos and sin only.

    q = rotary(q, cos, sin)    # q [b, heads, s, k], cos and sin [b, 1, s, k]
"""

from __future__ import annotations

from typing import Any

import torch

from autoptd.errors import InternalError
from autoptd.kernels.forms import needs_no_grad, takes_triton, tiles

Tensor = torch.Tensor


def rotary(
    x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False, backend: str = "eager"
) -> Tensor:
    """Return x * cos + rotate(x) * sin in the first r elements of the last dim, the others unchanged."""
    needs_no_grad(cos, "cosines", "rotary")
    needs_no_grad(sin, "sines", "rotary")
    width = cos.shape[-1]
    if cos.shape != sin.shape or width % 2 or width > x.shape[-1]:
        raise InternalError(
            "rotary", f"cannot turn {tuple(x.shape)} by {tuple(cos.shape)} and {tuple(sin.shape)}"
        )
    turned = (*x.shape[:-1], width)
    # The result is larger than x, which would be broadcast to the cosines.
    if torch.broadcast_shapes(turned, cos.shape) != turned:
        return rotary_plain(x, cos, sin, interleaved=interleaved)
    return _Rotary.apply(x, cos, sin, interleaved, takes_triton(backend, x, "rotary"))  # type: ignore[no-any-return, no-untyped-call]


def rotary_plain(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Compute `rotary` as models spell it."""
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    a, b = pairs(turned, interleaved)
    rotated = torch.stack((-b, a), -1).flatten(-2) if interleaved else torch.cat((-b, a), -1)
    y = turned * cos + rotated * sin
    return torch.cat((y, rest), -1) if rest.shape[-1] else y


def pairs(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Return views of the first and of the second elements of the pairs in the last dim."""
    if interleaved:
        return x[..., 0::2], x[..., 1::2]
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


class _Rotary(torch.autograd.Function):
    """Rotate; backward rotates by the negated sines, with those of a and b exchanged."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, triton: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.how, ctx.dtype = (interleaved, triton), x.dtype
        return _turned(x, cos, sin, torch.promote_types(x.dtype, cos.dtype), False, interleaved, triton)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        cos, sin = ctx.saved_tensors
        return _turned(grad, cos, sin, ctx.dtype, True, *ctx.how), None, None, None, None


def _turned(
    x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype, is_back: bool, interleaved: bool, triton: bool
) -> Tensor:
    """Rotate x forward or back in the widest dtype, and return the result in `dtype`."""
    if triton:
        from autoptd.kernels.rotary_triton import turned

        return turned(x, cos, sin, dtype, is_back, interleaved)
    width, computed = cos.shape[-1], torch.promote_types(x.dtype, cos.dtype)
    out = torch.empty_like(x, dtype=dtype)
    cos, sin = (each.to(computed).expand(*x.shape[:-1], width) for each in (cos, sin))
    for at in tiles(x):
        part, place = x[at][..., :width].to(computed), out[at][..., :width]
        # Write directly into the result if it needs no rounding.
        y = place if dtype == computed else torch.empty_like(place, dtype=computed)
        torch.mul(part, cos[at], out=y)
        (a, b), (y_a, y_b), (sin_a, sin_b) = (pairs(each, interleaved) for each in (part, y, sin[at]))
        # Forward is (a cos_a - b sin_a, b cos_b + a sin_b). Backward transposes the matrix, which swaps the
        # sines of a and b: the halves may have different ones.
        if is_back:
            y_a.addcmul_(b, sin_b)
            y_b.addcmul_(a, sin_a, value=-1)
        else:
            y_a.addcmul_(b, sin_a, value=-1)
            y_b.addcmul_(a, sin_b)
        if y is not place:
            place.copy_(y)
    out[..., width:] = x[..., width:]
    return out
