"""RMS norm and layer norm over the last dim, optionally fused with the addition of a residual.

In: x [..., h], a weight (and a bias) [h]. Statistics are in float32 (float64 for float64); the result has the
wider dtype of x and the weight. Saved for backward: the normalised input (x, or its sum with the residual),
and one or two numbers per row.

    y, x = rms_norm(h, w, eps=1e-6, residual=x)    # of x + h, which is the new x
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from autoptd.kernels.forms import takes_triton, tiles, wide

Tensor = torch.Tensor


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float,
    offset: float = 0.0,
    residual: Tensor | None = None,
    backend: str = "eager",
) -> Any:
    """Return x * rsqrt(mean(x^2) + eps) * (offset + weight); with a residual, (norm of sum, x + residual).

    `offset` is 1 for models that store weights as the difference from 1 (Gemma).
    """
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        # Leave a sum that broadcasts or promotes to torch, and normalise the result.
        x, residual = x + residual, None
        return rms_norm(x, weight, eps=eps, offset=offset, backend=backend), x
    triton = takes_triton(backend, x, "rms_norm", x.shape[-1])
    y, total = _RmsNorm.apply(x, weight, residual, eps, offset, triton)  # type: ignore[no-untyped-call]
    return y if residual is None else (y, total)


def rms_norm_plain(
    x: Tensor, weight: Tensor | None, *, eps: float, offset: float = 0.0, residual: Tensor | None = None
) -> Any:
    """Compute `rms_norm` as models spell it."""
    total = x if residual is None else x + residual
    h = total.to(wide(total.dtype))
    y = (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)).to(total.dtype)
    if weight is not None:
        y = (weight if offset == 0.0 else offset + weight) * y
    return y if residual is None else (y, total)


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float,
    residual: Tensor | None = None,
    backend: str = "eager",
) -> Any:
    """Return `F.layer_norm` over the last dim; with a residual, (norm of the sum, x + residual).

    The eager form is the plain one, as torch's layer norm is already fused.
    """
    # Without a residual there is nothing to gain over torch's kernel.
    fits = residual is not None and residual.shape == x.shape and residual.dtype == x.dtype
    if not fits or not takes_triton(backend, x, "layer_norm", x.shape[-1]):
        return layer_norm_plain(x, weight, bias, eps=eps, residual=residual)
    return _LayerNorm.apply(x, weight, bias, residual, eps)  # type: ignore[no-untyped-call]


def layer_norm_plain(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, *, eps: float, residual: Tensor | None = None
) -> Any:
    """Compute `layer_norm` as models spell it."""
    total = x if residual is None else x + residual
    y = F.layer_norm(total, total.shape[-1:], weight, bias, eps)
    return y if residual is None else (y, total)


class _RmsNorm(torch.autograd.Function):
    """Return (y, sum); the sum is None without a residual.

    With r the row's factor, f = offset + weight and g the gradient: dx = r f g - x r^3 mean(f g x).
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        residual: Tensor | None,
        eps: float,
        offset: float,
        triton: bool,
    ) -> tuple[Tensor, Tensor | None]:
        # An unused result then has the gradient None instead of zeros, which would have to be read.
        ctx.set_materialize_grads(False)
        ctx.offset, ctx.triton = offset, triton
        dtype = x.dtype if weight is None else torch.promote_types(x.dtype, weight.dtype)
        if triton:
            from autoptd.kernels.norms_triton import rms_norm_forward

            y, total, factor = rms_norm_forward(x, weight, residual, eps, offset, dtype)
        else:
            y, total, factor = _rms_norm_forward(x, weight, residual, eps, offset, dtype)
        ctx.save_for_backward(total, factor, weight)
        return y, None if residual is None else total

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_total: Tensor | None) -> tuple[Tensor | None, ...]:
        total, factor, weight = ctx.saved_tensors
        if grad is None:
            return grad_total, None, grad_total, None, None, None
        if ctx.triton:
            from autoptd.kernels.norms_triton import rms_norm_backward

            dx, dw = rms_norm_backward(grad, grad_total, total, factor, weight, ctx.offset)
        else:
            dx, dw = _rms_norm_backward(grad, grad_total, total, factor, weight, ctx.offset)
        # x and the residual are added up, so both have the sum's gradient.
        return dx, dw, dx if ctx.needs_input_grad[2] else None, None, None, None


def _rms_norm_forward(
    x: Tensor, weight: Tensor | None, residual: Tensor | None, eps: float, offset: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (y, the normalised input, the factor of every row [..., 1])."""
    width, statistics = x.shape[-1], wide(x.dtype)
    scale = None if weight is None else weight.to(statistics) + offset
    total = x if residual is None else torch.empty_like(x)
    y = torch.empty_like(x, dtype=dtype)
    factor = x.new_empty((*x.shape[:-1], 1), dtype=statistics)
    for at in tiles(x):
        if residual is not None:
            torch.add(x[at], residual[at], out=total[at])
        h = total[at].to(statistics)
        # Sums squares without materialising h^2; the next line undoes the root.
        r = torch.linalg.vector_norm(h, dim=-1, keepdim=True, out=factor[at])
        r.square_().div_(width).add_(eps).rsqrt_()
        # Write directly into y unless the plain form rounds in between.
        part = torch.mul(h, r, out=y[at]) if dtype == statistics else h * r
        if scale is not None:
            part.mul_(scale)
        if dtype != statistics:
            y[at].copy_(part)
    return y, total, factor


def _rms_norm_backward(
    grad: Tensor,
    grad_total: Tensor | None,
    total: Tensor,
    factor: Tensor,
    weight: Tensor | None,
    offset: float,
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of the normalised input and of the weight."""
    width = total.shape[-1]
    scale = factor.new_full((width,), 1.0) if weight is None else weight.to(factor.dtype) + offset
    dx = torch.empty_like(total)
    dw = None if weight is None else factor.new_zeros(width)
    for at in tiles(total):
        g, h, r = grad[at].to(factor.dtype), total[at].to(factor.dtype), factor[at]
        # Used twice: mean(f g x) for dx, and the sum over rows of r g x for the weight.
        product = g * h
        mean = (product @ scale).unsqueeze(-1) * r**3 / width
        if dw is not None:
            dw += r.reshape(-1) @ product.reshape(-1, width)
        part = torch.mul(g, r, out=dx[at]) if dx.dtype == factor.dtype else g * r
        if weight is not None:
            part.mul_(scale)
        part.addcmul_(h, mean, value=-1)
        if grad_total is not None:
            # The gradient from the residual stream.
            part += grad_total[at]
        if dx.dtype != factor.dtype:
            dx[at].copy_(part)
    return dx, None if dw is None or weight is None else dw.to(weight.dtype)


class _LayerNorm(torch.autograd.Function):
    """Return (y, sum), computed by Triton kernels."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        from autoptd.kernels.norms_triton import layer_norm_forward

        ctx.set_materialize_grads(False)
        y, total, mean, factor = layer_norm_forward(x, weight, bias, residual, eps)
        ctx.save_for_backward(total, mean, factor, weight, bias)
        return y, total

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_total: Tensor | None) -> tuple[Tensor | None, ...]:
        from autoptd.kernels.norms_triton import layer_norm_backward

        if grad is None:
            return grad_total, None, None, grad_total, None
        dx, dw, db = layer_norm_backward(grad, grad_total, *ctx.saved_tensors)
        return dx, dw, db, dx, None
