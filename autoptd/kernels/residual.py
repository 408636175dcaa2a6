"""Fuse the end of a block, residual + dropout(x + bias), in one buffer.

In: the output of the block's last linear layer, its bias if not added yet, the residual, and the places of
the dropout mask (see `dropout.py`). Nothing is saved for backward: the gradients are the incoming one, the
masked incoming one, and the sum of that over rows.

    x = bias_dropout_add(F.linear(h, w_proj), b_proj, x, rate=0.1, places=Places(*keys(seed, step, site)))
"""

from __future__ import annotations

from typing import Any

import torch

from autoptd.errors import InternalError
from autoptd.kernels.dropout import drop
from autoptd.kernels.dropout_mask import Places
from autoptd.kernels.forms import takes_triton, wide

Tensor = torch.Tensor
Size = tuple[int, int, int]


def bias_dropout_add(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    *,
    rate: float = 0.0,
    places: Places | None = None,
    size: Size | None = None,
    backend: str = "eager",
) -> Tensor:
    """Return residual + drop(x + bias, rate, places), of x [..., h] and bias [h].

    `size` is [before, rows, after], the view of x that the mask uses; by default the rows are the first dim.
    Without places, or at a rate of 0, nothing is dropped.
    """
    if places is None or rate == 0.0:
        # Normalise to one form of "nothing is dropped".
        rate, places = 0.0, None
    size = size or (1, x.shape[0], x[0].numel())
    dtypes = {each.dtype for each in (x, bias, residual) if each is not None}
    if x.shape != residual.shape or len(dtypes) > 1 or (bias is not None and bias.shape != x.shape[-1:]):
        return bias_dropout_add_plain(x, bias, residual, rate=rate, places=places, size=size)
    # The kernel can number the shards of one axis only.
    triton = takes_triton(backend, x, "bias_dropout_add") and (places is None or places.is_simple)
    # Without a mask only the fused bias of the Triton kernel gains anything over torch's additions.
    if places is None and (bias is None or not triton):
        return residual + x if bias is None else (x + bias).add_(residual)
    return _BiasDropoutAdd.apply(x, bias, residual, rate, places, size, triton)  # type: ignore[no-any-return, no-untyped-call]


def bias_dropout_add_plain(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    *,
    rate: float = 0.0,
    places: Places | None = None,
    size: Size | None = None,
) -> Tensor:
    """Compute `bias_dropout_add` as models spell it; only the mask is ours."""
    x = x if bias is None else x + bias
    if places is not None and rate:
        ones = torch.ones(size or (1, x.shape[0], x[0].numel()), dtype=x.dtype, device=x.device)
        x = x * drop(ones, rate, places).view(x.shape)
    return residual + x


class _BiasDropoutAdd(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        residual: Tensor,
        rate: float,
        places: Places | None,
        size: Size,
        triton: bool,
    ) -> Tensor:
        ctx.how, ctx.bias_dtype = (rate, places, size), None if bias is None else bias.dtype
        if triton:
            from autoptd.kernels.dropout_triton import bias_dropout_add_forward

            return bias_dropout_add_forward(x, bias, residual, rate, places, size)
        if places is None:
            raise InternalError("bias_dropout_add", "draws no mask here")
        # x + bias may be overwritten, x may not.
        y = (x if bias is None else x.contiguous() + bias).reshape(size)
        return drop(y, rate, places, out=None if bias is None else y).view(x.shape).add_(residual)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rate, places, size = ctx.how
        dx = db = None
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
            dx = grad if places is None else drop(grad.reshape(size), rate, places).view(grad.shape)
        if dx is not None and ctx.needs_input_grad[1]:
            # The residual gets the incoming gradient unchanged; x and the bias get the masked one.
            db = dx.reshape(-1, dx.shape[-1]).sum(0, dtype=wide(dx.dtype)).to(ctx.bias_dtype)
        return dx, db, grad, None, None, None, None
