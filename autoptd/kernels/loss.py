"""The head and the cross-entropy as one operator, some rows at a time: the logits of all rows never exist.

In: x [..., h], the head's weight [V, h], targets [...]. Out: what `F.cross_entropy(F.linear(x, weight, bias),
targets)` gives. For a mean or a sum, the gradients of x and of the weight are computed in forward, from the
logits of CHUNK_BYTES that are at hand, and backward scales them; for single losses ("none") backward computes
the logits again.

    loss = linear_cross_entropy(x, w_head, targets)

Kept for backward: the gradients, which are as large as x, weight and bias, those of the latter two in
float32; for "none" x, weight, bias and three to six numbers a row. Sums over rows, and what is narrower than
float32, are in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from autoptd.compat import add_mm
from autoptd.errors import InternalError
from autoptd.ir.fusion import CHUNK_BYTES, CHUNK_ROWS
from autoptd.kernels.cross_entropy import Labels, Loss, Terms, softmax_here
from autoptd.kernels.forms import scaled, takes_triton, wide

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
    """Return the cross-entropy of the logits x weight^T + bias and class ids, with the options of
    `F.cross_entropy`.

    `class_weight` [V] is its `weight`; `softcap` makes the logits softcap * tanh(logits / softcap); `total`
    is what a mean divides by, if not by its own count; `chunk` is how many rows are done at a time; `dtype`
    is that of the loss (by default that of x), which is computed in float32 at least. With `wgrad` the
    gradient of the weight, a leaf, is given to that in backward, as it was added up, and not to autograd.
    `loss_scale` is what backward will start from: with it, the gradients kept of a mean are in the range of
    x's dtype where those of backward are.
    """
    ids = targets.reshape(-1)
    ignored = ids == ignore_index
    # All columns are on this rank: only an ignored target has none here.
    labels = Labels(ids.masked_fill(ignored, 0), ignored, ignored)
    rows = len(weight)
    loss = Loss(
        label_smoothing,
        rows,
        rows,
        _alone,
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
    """Return how many rows have logits of about CHUNK_BYTES, of `columns` columns in the dtype they are
    computed in.
    """
    most = CHUNK_BYTES["cuda" if device.type == "cuda" else "cpu"]
    return max(CHUNK_ROWS, most // max(1, columns * wide(dtype).itemsize))


def can_use_triton(backend: str, x: Tensor, class_weight: Tensor | None) -> bool:
    """Return whether the passes over the logits are Triton's: these know no class weights."""
    return takes_triton(backend, x, "linear_cross_entropy") and class_weight is None


@dataclass(frozen=True)
class How:
    """What is asked of the chunked loss besides the loss of rows: see `linear_cross_entropy`."""

    reduction: str
    chunk: int
    softcap: float | None = None
    triton: bool = False
    wgrad: Callable[[WeightSum], None] | None = None
    loss_scale: float | None = None

    def __post_init__(self) -> None:
        if self.reduction not in ("mean", "sum", "none") or self.chunk < 1:
            raise InternalError(
                "linear_cross_entropy", f"cannot reduce by {self.reduction!r}, {self.chunk} rows at a time"
            )


class WeightSum(NamedTuple):
    """The gradient of a weight: `total` times `scale`, a number in the dtype of the total."""

    weight: Tensor
    total: Tensor
    scale: Tensor

    def add_to(self, grad: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return it in `dtype`, added to `grad` in its place if there is one."""
        if grad is not None and grad.dtype == self.total.dtype:
            return grad.addcmul_(self.total, self.scale)
        found = scaled(self.total, self.scale, dtype if grad is None else grad.dtype)
        return found if grad is None else grad.add_(found)


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
    """Return the loss in the dtype it is computed in: 0-d, or of `shape` where it is not reduced."""
    flat = x.reshape(-1, x.shape[-1])
    if how.reduction == "none":
        return _LossOfRows.apply(flat, weight, bias, labels, loss, how).reshape(shape)  # type: ignore[no-any-return, no-untyped-call]
    if not torch.is_grad_enabled():
        # No backward will come to call it.
        how = replace(how, wgrad=None)
    # Asked before the weight is detached below: forward sees tensors only, and could not tell.
    wanted = _Wanted(flat.requires_grad, weight.requires_grad, bias is not None and bias.requires_grad)
    if how.wgrad is not None and weight.requires_grad:
        wanted, weight = wanted._replace(leaf=weight), weight.detach()
        if not flat.requires_grad:
            # Autograd calls this backward only if an input needs a gradient.
            flat = flat.detach().requires_grad_()
    return _ReducedLoss.apply(flat, weight, bias, labels, loss, how, total, wanted)  # type: ignore[no-any-return, no-untyped-call]


def _alone(numbers: Tensor, op: str) -> Tensor:
    return numbers


def _widened(class_weight: Tensor, x: Tensor) -> Tensor:
    return class_weight.to(wide(x.dtype))


class _Chunk:
    """The logits of some rows, in the dtype of the loss: then their softmax, then their gradient, in one
    place.
    """

    def __init__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, labels: Labels, loss: Loss, how: How
    ) -> None:
        self.labels, self.loss, self.how, self.dtype = labels, loss, how, x.dtype
        z = _linear(x, weight, bias)
        # Triton's passes widen each element as they read it; torch's operators need a wide copy.
        self.z = z if how.triton else z.to(wide(z.dtype))
        self.slope = None
        if how.softcap is not None:
            # In the memory of z: z / c, then tanh of it, then c tanh(z / c). Its slope is 1 - tanh^2.
            self.z.div_(how.softcap).tanh_()
            self.slope = 1.0 - self.z.square()
            self.z.mul_(how.softcap)

    def terms(self) -> Terms:
        if self.how.triton:
            from autoptd.kernels.cross_entropy_triton import terms

            return terms(self.loss, self.z, self.labels)
        return self.loss.shares(self.z, self.labels, out=self.z)

    def gradients(self, terms: Terms, grad: Tensor) -> Tensor:
        """Return the gradient of the logits before the softcap, in the dtype of x, for `grad`, that of the
        rows' losses.
        """
        if self.how.triton:
            from autoptd.kernels.cross_entropy_triton import gradients_

            z = gradients_(self.loss, self.z, terms, self.labels, grad)
        else:
            z = self.loss.gradients(self.z, terms, self.labels, grad, out=self.z)
        z = z if self.slope is None else z.mul_(self.slope)
        return z if z.dtype == self.dtype else _rows_like(z, self.dtype).copy_(z)


# Rows of logits begin at multiples of so many bytes. In half precision products of matrices whose rows do not begin at
# multiples of 16 are five times as slow on an H100: GPT-2's vocabulary, 50,257, is odd. 128 is a line of its cache.
ROW_BYTES = {"cuda": 128}


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return `F.linear(x, weight, bias)` of a matrix x, in rows that begin at multiples of ROW_BYTES."""
    if len(weight) * x.element_size() % ROW_BYTES.get(x.device.type, 1) == 0:
        return F.linear(x, weight, bias)
    out = _rows_like(x, x.dtype, len(weight))
    return torch.mm(x, weight.t(), out=out) if bias is None else torch.addmm(bias, x, weight.t(), out=out)


def _rows_like(x: Tensor, dtype: torch.dtype, columns: int = 0) -> Tensor:
    """Return an empty matrix with the rows of x, by default the columns too, that begin at multiples of ROW_BYTES."""
    columns = columns or x.shape[1]
    step = max(1, ROW_BYTES.get(x.device.type, 0) // dtype.itemsize)
    return x.new_empty((len(x), -(-columns // step) * step), dtype=dtype)[:, :columns]


class _Wanted(NamedTuple):
    """Whether the gradients of x, weight and bias are wanted.

    The weight itself, where autograd does not see it.
    """

    x: bool
    weight: bool
    bias: bool
    leaf: Tensor | None = None


class _Sums:
    """The gradients of x, weight and bias, of those that are wanted, summed up chunk by chunk."""

    def __init__(self, wanted: _Wanted, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        self.wants_weight, self.wants_bias = wanted.weight, bias is not None and wanted.bias
        self.x = torch.empty_like(x) if wanted.x else None
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None

    def add(self, at: slice, dz: Tensor, x: Tensor, weight: Tensor) -> None:
        if self.x is not None:
            # z = x w^T: dx = dz w, of these rows; dw = dz^T x, summed over all rows.
            torch.mm(dz, weight, out=self.x[at])
        if self.wants_weight:
            self.weight = add_mm(self.weight, dz.t(), x[at], wide(weight.dtype))
        if self.wants_bias:
            each = dz.sum(0, dtype=wide(dz.dtype))
            self.bias = each if self.bias is None else self.bias.add_(each)


class _ReducedLoss(torch.autograd.Function):
    """The sum over rows, divided by the sum of their shares for a mean.

    The gradients kept are those of the sum, or with a loss scale about what backward will make of them.
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
        wanted: _Wanted,
    ) -> Tensor:
        sums = _Sums(wanted, x, weight, bias)
        result, share = x.new_zeros((2,), dtype=wide(x.dtype))
        expected = _expected_gradient(how, labels, total, share)
        for start in range(0, len(x), how.chunk):
            at = slice(start, start + how.chunk)
            chunk = _Chunk(x[at], weight, bias, labels.rows(at), loss, how)
            terms = chunk.terms()
            result = result + loss.of_rows(terms, chunk.labels).sum()
            share = share + terms.share.sum()
            # Now, while the chunk's logits are at hand: backward would have to compute them again.
            if any(ctx.needs_input_grad):
                each = torch.ones_like(terms.total).mul_(expected)
                sums.add(at, chunk.gradients(terms, each), x, weight)
            # Free it before the next chunk is allocated.
            del chunk
        divisor = torch.ones_like(share)
        if how.reduction == "mean":
            divisor = share if total is None else divisor.mul_(total)
        # A mean over no valid row is 0 / 0: NaN as in torch, with gradients of 0.
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
            # Returns None: the gradient goes to its sum over microbatches, past autograd.
            dw = wgrad(WeightSum(leaf, dw, scale))
        dw = None if dw is None else scaled(dw, scale, weight_dtype)
        db = None if db is None else scaled(db, scale, bias_dtype)
        return dx, dw, db, *[None] * 5


def _expected_gradient(how: How, labels: Labels, total: Tensor | float | None, like: Tensor) -> Tensor:
    """Return the gradient of the sum that backward is expected to bring: 1 without a loss scale."""
    # What follows a sum, a division as a rule, is not known here.
    if how.loss_scale is None or how.reduction == "sum":
        return torch.ones_like(like)
    expected = torch.full_like(like, how.loss_scale)
    if total is None:
        total = (~labels.ignored).sum()
    # Of no valid row there are no gradients.
    return expected / torch.as_tensor(total, dtype=like.dtype, device=like.device).clamp(min=1)


class _LossOfRows(torch.autograd.Function):
    """The loss of every row; its gradient needs the logits again."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, labels: Labels, loss: Loss, how: How
    ) -> Tensor:
        losses, kept = [], []
        for start in range(0, len(x), how.chunk):
            at = slice(start, start + how.chunk)
            chunk = _Chunk(x[at], weight, bias, labels.rows(at), loss, how)
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
        sums = _Sums(_Wanted(*ctx.needs_input_grad[:3]), x, weight, bias)
        for start, terms in zip(range(0, len(x), how.chunk), kept, strict=True):
            at = slice(start, start + how.chunk)
            chunk = _Chunk(x[at], weight, bias, labels.rows(at), loss, how)
            if not how.triton:
                # `gradients` starts from the softmax that `shares` leaves; the terms were kept.
                softmax_here(chunk.z, loss.real, out=chunk.z)
            sums.add(at, chunk.gradients(terms, grad[at]), x, weight)
            del chunk
        dw = None if sums.weight is None else sums.weight.to(weight.dtype)
        db = None if bias is None or sums.bias is None else sums.bias.to(bias.dtype)
        return sums.x, dw, db, None, None, None
