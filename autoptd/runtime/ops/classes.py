"""Operators over classes that are split over ranks: softmax, log_softmax, logsumexp, argmax, and a gather of chosen ones.

In: this rank's classes of the scores, n of V = t * n along `dim`: rank i owns [i * n, (i + 1) * n). With `size`, V is that
many, and classes beyond it are *padding*: not in any sum, and without gradient. Out: this rank's classes of softmax and
log_softmax (S); one value for all classes of logsumexp and argmax, the same on every rank (I); the part of a gather that this
rank has (P).

    log_p = classes_log_softmax(logits, tp, dim=-1, site="loss")
    chosen = p_to_i(classes_gather(log_p, labels, tp, dim=-1), tp, site="loss")

Scores are never gathered. With N rows, N numbers are reduced for the maximum and N for the sum of exponentials; backward of
softmax and log_softmax reduces N for the sum of gradients, that of the others nothing. Narrower scores than float32 are
computed in float32; the result has their dtype, or `dtype`. Entropy, KL, distillation, focal and policy losses are made of
these.
"""

from __future__ import annotations

from typing import Any

import torch

from autoptd.kernels.forms import wide
from autoptd.runtime.ops.shards import real_rows
from autoptd.runtime.world.world import Group

Tensor = torch.Tensor


def classes_log_softmax(
    x: Tensor, group: Group, *, dim: int, size: int = 0, dtype: torch.dtype | None = None, site: str = ""
) -> Tensor:
    """Return this rank's part of `x.log_softmax(dim)`; zero in the padding."""
    return _LogSoftmax.apply(x, group, dim % x.dim(), size, dtype or x.dtype, site)  # type: ignore[no-any-return, no-untyped-call]


def classes_softmax(
    x: Tensor, group: Group, *, dim: int, size: int = 0, dtype: torch.dtype | None = None, site: str = ""
) -> Tensor:
    """Return this rank's part of `x.softmax(dim)`; zero in the padding."""
    return _Softmax.apply(x, group, dim % x.dim(), size, dtype or x.dtype, site)  # type: ignore[no-any-return, no-untyped-call]


def classes_logsumexp(
    x: Tensor, group: Group, *, dim: int, keepdim: bool = False, size: int = 0, site: str = ""
) -> Tensor:
    """Return `logsumexp` over the classes of all ranks."""
    dim = dim % x.dim()
    total = _LogSumExp.apply(x, group, dim, size, site)  # type: ignore[no-untyped-call]
    return total if keepdim else total.squeeze(dim)  # type: ignore[no-any-return]


def classes_gather(x: Tensor, index: Tensor, group: Group, *, dim: int, size: int = 0) -> Tensor:
    """Return this rank's part of `x.gather(dim, index)`: zeros where another rank has the class.

    A class that no rank has fails as it does in torch.
    """
    dim = dim % x.dim()
    columns = x.shape[dim]
    first, classes = group.index * columns, size or columns * group.size
    elsewhere = (index >= 0) & (index < classes) & ((index < first) | (index >= first + columns))
    local = (index - first).masked_fill(elsewhere, 0)
    # A class in the padding would be found: move it out of range.
    local = local.masked_fill(index >= classes, columns)
    return x.gather(dim, local).masked_fill(elsewhere, 0.0)


@torch.no_grad()
def classes_argmax(
    x: Tensor, group: Group, *, dim: int, keepdim: bool = False, size: int = 0, site: str = ""
) -> Tensor:
    """Return the number of the largest class, the first of equal ones; it has no gradient."""
    dim = dim % x.dim()
    scores = _without_padding(x.to(wide(x.dtype)), group, dim, size)
    largest, place = scores.max(dim, keepdim=True)
    top = group.all_reduce(largest, f"{site} maximum", op="max")
    # Of ranks with the maximum, or with NaN, the first one: the smallest number, as the largest negative one.
    elsewhere = (largest != top) & ~largest.isnan()
    own = (-(place + group.index * x.shape[dim])).masked_fill(elsewhere, -x.shape[dim] * group.size)
    number = -group.all_reduce(own, f"{site} position", op="max")
    return number if keepdim else number.squeeze(dim)


def _without_padding(z: Tensor, group: Group, dim: int, size: int, fill: float = float("-inf")) -> Tensor:
    """Return scores whose padding is `fill`."""
    columns = z.shape[dim]
    real = real_rows(size, columns, group.index)
    if real == columns:
        return z
    padding = torch.arange(columns, device=z.device) >= real
    return z.masked_fill(padding.view(-1, *[1] * (z.dim() - 1 - dim)), fill)


def _log_total(z: Tensor, group: Group, dim: int, site: str) -> Tensor:
    """Return logsumexp of all ranks' scores, keeping the dim."""
    top = group.all_reduce(z.amax(dim, keepdim=True), f"{site} maximum", op="max")
    # In rows without a finite score the exponentials would be NaN; subtracting 0 leaves the sum correct.
    top = top.masked_fill(top.isinf(), 0.0)
    return top + group.all_reduce((z - top).exp_().sum(dim, keepdim=True), f"{site} sum").log_()


def _sum_gradients(grad: Tensor, group: Group, dim: int, site: str) -> Tensor:
    return group.all_reduce(grad.sum(dim, keepdim=True), f"{site} gradients backward")


class _LogSoftmax(torch.autograd.Function):
    """z - logsumexp(z); its gradient is grad - softmax * sum(grad). The result is all that is saved."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: Group, dim: int, size: int, dtype: torch.dtype, site: str
    ) -> Tensor:
        z = _without_padding(x.to(wide(x.dtype)), group, dim, size)
        result = (z - _log_total(z, group, dim, site)).to(dtype)
        # Minus infinity in the padding would be NaN in products.
        result = _without_padding(result, group, dim, size, 0.0)
        ctx.save_for_backward(result)
        ctx.how = group, dim, size, x.dtype, site
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (result,), (group, dim, size, dtype, site) = ctx.saved_tensors, ctx.how
        grad = _without_padding(grad.to(wide(grad.dtype)), group, dim, size, 0.0)
        total = _sum_gradients(grad, group, dim, site)
        back = grad - result.to(grad.dtype).exp() * total
        return _without_padding(back, group, dim, size, 0.0).to(dtype), None, None, None, None, None


class _Softmax(torch.autograd.Function):
    """exp(z - logsumexp(z)); its gradient is softmax * (grad - sum(grad * softmax)). The result is all that is saved."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: Group, dim: int, size: int, dtype: torch.dtype, site: str
    ) -> Tensor:
        z = _without_padding(x.to(wide(x.dtype)), group, dim, size)
        result = (z - _log_total(z, group, dim, site)).exp_().to(dtype)
        ctx.save_for_backward(result)
        ctx.how = group, dim, x.dtype, site
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (result,), (group, dim, dtype, site) = ctx.saved_tensors, ctx.how
        # Zero in the padding, as the result is.
        product = grad.to(wide(grad.dtype)) * result
        back = product - result * _sum_gradients(product, group, dim, site)
        return back.to(dtype), None, None, None, None, None


class _LogSumExp(torch.autograd.Function):
    """log(sum(exp(z))), keeping the dim; its gradient is the softmax over this rank's classes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int, size: int, site: str) -> Tensor:
        z = _without_padding(x.to(wide(x.dtype)), group, dim, size)
        total = _log_total(z, group, dim, site)
        ctx.save_for_backward(x, total)
        ctx.how = group, dim, size
        return total.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x, total), (group, dim, size) = ctx.saved_tensors, ctx.how
        z = _without_padding(x.to(total.dtype), group, dim, size)
        return ((z - total).exp_() * grad).to(x.dtype), None, None, None, None
