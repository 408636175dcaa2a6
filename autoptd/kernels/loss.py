"""Fuse the head with the cross-entropy, chunk by chunk, so that the full logits are never materialised.

In: x [..., h], the head's weight [V, h], targets [...]. Out: the value of
`F.cross_entropy(F.linear(x, weight, bias), targets)`. For a mean or a sum, forward computes the gradients of x
and of the weight from each chunk of CHUNK_BYTES of logits, and backward scales them; with reduction "none"
backward recomputes the logits.

    loss = linear_cross_entropy(x, w_head, targets)

Saved for backward: the gradients of x, weight and bias, the latter two in float32; for "none" x, weight, bias
and three to six numbers per row. Sums over rows, and arithmetic on narrower dtypes, are in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from autoptd.ir.fusion import CHUNK_BYTES, CHUNK_ROWS
from autoptd.kernels.cross_entropy import Labels, Loss, softmax_here
from autoptd.kernels.forms import scaled, takes_triton, wide
from autoptd.kernels.loss_chunks import Chunk, How, Inputs, Sums, Wanted, WeightSum, alone, at_once, in_turn

Tensor = torch.Tensor


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    total: Tensor | float | None = None,
    chunk: int | None = None,
    dtype: torch.dtype | None = None,
    wgrad: Callable[[WeightSum], None] | None = None,
    loss_scale: float | None = None,
    backend: str = "eager",
) -> Tensor:
    """Return the cross-entropy of the logits x weight^T + bias, with the options of `F.cross_entropy`.

    `class_weight` [V] is its `weight`; `softcap` makes the logits softcap * tanh(logits / softcap); `total`
    overrides the divisor of a mean; `chunk` is the number of rows per chunk; `dtype` is the dtype of the loss
    (by default that of x), which is computed in float32 at least. With `wgrad`, backward passes the summed
    gradient of the weight, a leaf, to that function instead of autograd. `loss_scale` is the gradient that
    backward will start from: with it, the saved gradients of a mean fit the range of x's dtype whenever the
    gradients in backward do.
    """
    ids = targets.reshape(-1)
    ignored = ids == ignore_index
    # All columns are on this rank: only ignored targets are missing.
    labels = Labels(ids.masked_fill(ignored, 0), ignored, ignored)
    rows = len(weight)
    loss = Loss(
        label_smoothing,
        rows,
        rows,
        alone,
        class_weight if class_weight is None else _widened(class_weight, x),
    )
    chunk = chunk or default_chunk(rows, x.dtype, x.device)
    how = How(reduction, chunk, softcap, can_use_triton(backend, x, class_weight), wgrad, loss_scale)
    return chunked_loss(x, weight, bias, labels, loss, how, total, targets.shape).to(dtype or x.dtype)


def linear_cross_entropy_plain(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute `linear_cross_entropy` as models spell it."""
    logits = F.linear(x, weight, bias)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.to(dtype or x.dtype).reshape(-1, len(weight))
    options = {"ignore_index": ignore_index, "reduction": reduction, "label_smoothing": label_smoothing}
    loss = F.cross_entropy(logits, targets.reshape(-1), class_weight, **options)  # type: ignore[arg-type]
    return loss.reshape(targets.shape) if reduction == "none" else loss


def default_chunk(columns: int, dtype: torch.dtype, device: torch.device) -> int:
    """Return how many rows of `columns` logits, in the compute dtype, take CHUNK_BYTES."""
    most = CHUNK_BYTES["cuda" if device.type == "cuda" else "cpu"]
    return max(CHUNK_ROWS, most // max(1, columns * wide(dtype).itemsize))


def can_use_triton(backend: str, x: Tensor, class_weight: Tensor | None) -> bool:
    """Return whether Triton kernels can process the logits: they do not support class weights."""
    return takes_triton(backend, x, "linear_cross_entropy") and class_weight is None


def chunked_loss(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Labels,
    loss: Loss,
    how: How,
    total: Tensor | float | None,
    shape: torch.Size,
) -> Tensor:
    """Return the loss in its compute dtype: 0-d, or of `shape` where it is not reduced."""
    flat = x.reshape(-1, x.shape[-1])
    if how.reduction == "none":
        return _LossOfRows.apply(flat, weight, bias, labels, loss, how).reshape(shape)  # type: ignore[no-any-return, no-untyped-call]
    if not torch.is_grad_enabled():
        # There will be no backward to call it.
        how = replace(how, wgrad=None)
    # Read before the weight is detached below, which hides it from forward.
    wanted = Wanted(flat.requires_grad, weight.requires_grad, bias is not None and bias.requires_grad)
    if how.wgrad is not None and weight.requires_grad:
        wanted, weight = wanted._replace(leaf=weight), weight.detach()
        if not flat.requires_grad:
            # Autograd calls this backward only if an input needs a gradient.
            flat = flat.detach().requires_grad_()
    return _ReducedLoss.apply(flat, weight, bias, labels, loss, how, total, wanted)  # type: ignore[no-any-return, no-untyped-call]


def _widened(class_weight: Tensor, x: Tensor) -> Tensor:
    return class_weight.to(wide(x.dtype))


class _ReducedLoss(torch.autograd.Function):
    """Sum the losses of rows, and for a mean divide by the sum of their shares.

    The saved gradients are those of the sum; with a loss scale they are prescaled to what backward needs.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Labels,
        loss: Loss,
        how: How,
        total: Tensor | float | None,
        wanted: Wanted,
    ) -> Tensor:
        sums = Sums(wanted, x, weight, bias)
        expected = _expected_gradient(how, labels, total, x)
        pass_over = at_once if how.triton and loss.reduce is alone and how.softcap is None else in_turn
        inputs = Inputs(x, weight, bias, labels)
        result, share = pass_over(inputs, loss, how, expected, sums if any(ctx.needs_input_grad) else None)
        divisor = torch.ones_like(share)
        if how.reduction == "mean":
            divisor = share if total is None else divisor.mul_(total)
        # A mean over no valid rows is 0 / 0: NaN as in torch, with gradients of 0.
        ctx.save_for_backward(sums.x, sums.weight, sums.bias, divisor * expected, labels.ignored.all())
        ctx.how = how.wgrad, wanted.leaf, weight.dtype, None if bias is None else bias.dtype
        return result / divisor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        dx, dw, db, divisor, is_empty = ctx.saved_tensors
        scale = torch.where(is_empty, 0.0, grad / divisor)
        wgrad, leaf, weight_dtype, bias_dtype = ctx.how
        dx = None if dx is None else scaled(dx, scale, dx.dtype)
        if leaf is not None:
            # Returns None to autograd: the gradient goes directly into its sum over microbatches.
            dw = wgrad(WeightSum(leaf, dw, scale))
        dw = None if dw is None else scaled(dw, scale, weight_dtype)
        db = None if db is None else scaled(db, scale, bias_dtype)
        return dx, dw, db, *[None] * 5


def _expected_gradient(how: How, labels: Labels, total: Tensor | float | None, x: Tensor) -> Tensor:
    """Return the gradient of the sum that backward is expected to pass in: 1 without a loss scale."""
    # A sum is usually divided later, by a number unknown here.
    if how.loss_scale is None or how.reduction == "sum":
        return x.new_ones((), dtype=wide(x.dtype))
    expected = x.new_full((), how.loss_scale, dtype=wide(x.dtype))
    if total is None:
        total = (~labels.ignored).sum()
    # Without valid rows there are no gradients to scale, but the divisor must not be 0.
    return expected / torch.as_tensor(total, dtype=expected.dtype, device=x.device).clamp(min=1)


class _LossOfRows(torch.autograd.Function):
    """Compute the loss of every row; backward recomputes the logits."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, labels: Labels, loss: Loss, how: How
    ) -> Tensor:
        losses, kept = [], []
        for start in range(0, len(x), how.chunk):
            at = slice(start, start + how.chunk)
            chunk = Chunk(x[at], weight, bias, labels.rows(at), loss, how)
            terms = chunk.terms()
            losses.append(loss.of_rows(terms, chunk.labels))
            kept.append(terms)
            del chunk
        ctx.save_for_backward(x, weight, bias)
        ctx.how = labels, loss, how, kept
        return torch.cat(losses) if losses else x.new_zeros(0, dtype=wide(x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors
        labels, loss, how, kept = ctx.how
        sums = Sums(Wanted(*ctx.needs_input_grad[:3]), x, weight, bias)
        for start, terms in zip(range(0, len(x), how.chunk), kept, strict=True):
            at = slice(start, start + how.chunk)
            chunk = Chunk(x[at], weight, bias, labels.rows(at), loss, how)
            if not how.triton:
                # `gradients` starts from the softmax that `shares` leaves; the terms were kept.
                softmax_here(chunk.z, loss.real, out=chunk.z)
            sums.add(at, chunk.gradients(terms, grad[at]), x, weight)
            del chunk
        dw = None if sums.weight is None else sums.weight.to(weight.dtype)
        db = None if bias is None or sums.bias is None else sums.bias.to(bias.dtype)
        return sums.x, dw, db, None, None, None
