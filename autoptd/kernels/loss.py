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

from collections.abc import Callable, Iterator
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
# Alignment of the rows of logits. Half-precision GEMMs are five times slower on an H100 if rows are not
# aligned to 16 bytes, and GPT-2's vocabulary, 50,257, is odd. 128 is the size of a cache line.
ROW_BYTES = {"cuda": 128}


class WeightSum(NamedTuple):
    """Represent the gradient of a weight as `total` times `scale`, a number in the dtype of the total."""

    weight: Tensor
    total: Tensor
    scale: Tensor

    def add_to(self, grad: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return the gradient in `dtype`, accumulated into `grad` in place if given."""
        if grad is not None and grad.dtype == self.total.dtype:
            return grad.addcmul_(self.total, self.scale)
        found = scaled(self.total, self.scale, dtype if grad is None else grad.dtype)
        return found if grad is None else grad.add_(found)


@dataclass(frozen=True)
class LossOptions:
    """The options of a head's loss: those of `F.cross_entropy`, and how it is computed.

    `class_weight` [V] is the `weight` of `F.cross_entropy`; `softcap` makes the logits softcap * tanh(logits / softcap);
    `total` overrides the divisor of a mean; `chunk` is the number of rows per chunk (0: as many as CHUNK_BYTES hold);
    `dtype` is the dtype of the loss (by default that of x), which is computed in float32 at least. With `wgrad`, backward
    passes the summed gradient of the weight, a leaf, to that function instead of autograd. `loss_scale` is the gradient
    that backward will start from: with it, the saved gradients of a mean fit the range of x's dtype whenever the gradients
    in backward do.
    """

    bias: Tensor | None = None
    class_weight: Tensor | None = None
    ignore_index: int = -100
    reduction: str = "mean"
    label_smoothing: float = 0.0
    softcap: float | None = None
    total: Tensor | float | None = None
    chunk: int = 0
    dtype: torch.dtype | None = None
    wgrad: Callable[[WeightSum], None] | None = None
    loss_scale: float | None = None
    backend: str = "eager"
    # Whether Triton kernels process the logits; set by `chunked_loss`.
    triton: bool = False

    def __post_init__(self) -> None:
        if self.reduction not in ("mean", "sum", "none") or self.chunk < 0:
            raise InternalError(
                "linear_cross_entropy", f"cannot reduce by {self.reduction!r}, {self.chunk} rows at a time"
            )


def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> Tensor:
    """Return the cross-entropy of the logits x weight^T + bias; the options are those of `LossOptions`."""
    how = LossOptions(**options)
    ids = targets.reshape(-1)
    ignored = ids == how.ignore_index
    # All columns are on this rank: only ignored targets are missing.
    labels = Labels(ids.masked_fill(ignored, 0), ignored, ignored)
    class_weight = None if how.class_weight is None else how.class_weight.to(wide(x.dtype))
    loss = Loss(how.label_smoothing, len(weight), len(weight), alone, class_weight)
    return chunked_loss(x, weight, labels, loss, how, targets.shape)


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


def chunked_loss(
    x: Tensor, weight: Tensor, labels: Labels, loss: Loss, options: LossOptions, shape: torch.Size
) -> Tensor:
    """Return the loss in the requested dtype: 0-d, or of `shape` where it is not reduced."""
    flat, bias = x.reshape(-1, x.shape[-1]), options.bias
    # The kernels do not support class weights.
    triton = takes_triton(options.backend, x, "linear_cross_entropy") and options.class_weight is None
    chunk = options.chunk or default_chunk(len(weight), x.dtype, x.device)
    # The bias is a separate argument, for autograd.
    how = replace(options, chunk=chunk, triton=triton, bias=None, class_weight=None)
    # Computed in float32 at least, rounded here once.
    dtype = options.dtype or x.dtype
    if how.reduction == "none":
        losses = _LossOfRows.apply(flat, weight, bias, labels, loss, how)  # type: ignore[no-untyped-call]
        return losses.reshape(shape).to(dtype)  # type: ignore[no-any-return]
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
    return _ReducedLoss.apply(flat, weight, bias, labels, loss, how, wanted).to(dtype)  # type: ignore[no-any-return, no-untyped-call]


def default_chunk(columns: int, dtype: torch.dtype, device: torch.device) -> int:
    """Return how many rows of `columns` logits, in the compute dtype, take CHUNK_BYTES."""
    most = CHUNK_BYTES["cuda" if device.type == "cuda" else "cpu"]
    return max(CHUNK_ROWS, most // max(1, columns * wide(dtype).itemsize))


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
        how: LossOptions,
        wanted: Wanted,
    ) -> Tensor:
        sums = Sums(wanted, x, weight, bias)
        expected = _expected_gradient(how, labels, x)
        pass_over = at_once if how.triton and loss.reduce is alone and how.softcap is None else in_turn
        inputs = Inputs(x, weight, bias, labels)
        result, share = pass_over(inputs, loss, how, expected, sums if any(ctx.needs_input_grad) else None)
        divisor = torch.ones_like(share)
        if how.reduction == "mean":
            divisor = share if how.total is None else divisor.mul_(how.total)
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
        return dx, dw, db, None, None, None, None


def _expected_gradient(how: LossOptions, labels: Labels, x: Tensor) -> Tensor:
    """Return the gradient of the sum that backward is expected to pass in: 1 without a loss scale."""
    # A sum is usually divided later, by a number unknown here.
    if how.loss_scale is None or how.reduction == "sum":
        return x.new_ones((), dtype=wide(x.dtype))
    expected = x.new_full((), how.loss_scale, dtype=wide(x.dtype))
    total = (~labels.ignored).sum() if how.total is None else how.total
    # Without valid rows there are no gradients to scale, but the divisor must not be 0.
    return expected / torch.as_tensor(total, dtype=expected.dtype, device=x.device).clamp(min=1)


class _LossOfRows(torch.autograd.Function):
    """Compute the loss of every row; backward recomputes the logits."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, labels: Labels, loss: Loss, how: LossOptions
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


def alone(numbers: Tensor, op: str) -> Tensor:
    return numbers


class Chunk:
    """Hold the logits of some rows, then their softmax, then their gradient, in one buffer."""

    def __init__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, labels: Labels, loss: Loss, how: LossOptions
    ) -> None:
        self.labels, self.loss, self.how, self.dtype = labels, loss, how, x.dtype
        z = linear(x, weight, bias)
        # The Triton kernels upcast on load; torch operators need an upcast copy.
        self.z = z if how.triton else z.to(wide(z.dtype))
        self.slope = None
        if how.softcap is not None:
            # In place: z / c, then tanh of it, then c tanh(z / c). The derivative is 1 - tanh^2.
            self.z.div_(how.softcap).tanh_()
            self.slope = 1.0 - self.z.square()
            self.z.mul_(how.softcap)

    def terms(self) -> Terms:
        if self.how.triton:
            from autoptd.kernels.cross_entropy_triton import terms

            return terms(self.loss, self.z, self.labels)
        return self.loss.shares(self.z, self.labels, out=self.z)

    def gradients(self, terms: Terms, grad: Tensor) -> Tensor:
        """Return the gradient of the logits before the softcap, in the dtype of x.

        `grad` is the gradient of the rows' losses.
        """
        if self.how.triton:
            from autoptd.kernels.cross_entropy_triton import gradients_

            z = gradients_(self.loss, self.z, terms, self.labels, grad)
        else:
            z = self.loss.gradients(self.z, terms, self.labels, grad, out=self.z)
        z = z if self.slope is None else z.mul_(self.slope)
        return z if z.dtype == self.dtype else _rows_like(z, self.dtype).copy_(z)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return `F.linear(x, weight, bias)` of a matrix x, with rows aligned to ROW_BYTES."""
    if len(weight) * x.element_size() % ROW_BYTES.get(x.device.type, 1) == 0:
        return F.linear(x, weight, bias)
    out = _rows_like(x, x.dtype, len(weight))
    return torch.mm(x, weight.t(), out=out) if bias is None else torch.addmm(bias, x, weight.t(), out=out)


def _rows_like(x: Tensor, dtype: torch.dtype, columns: int = 0) -> Tensor:
    """Return an empty matrix with as many rows as x (and columns, by default), aligned to ROW_BYTES."""
    columns = columns or x.shape[1]
    step = max(1, ROW_BYTES.get(x.device.type, 0) // dtype.itemsize)
    return x.new_empty((len(x), -(-columns // step) * step), dtype=dtype)[:, :columns]


class Wanted(NamedTuple):
    """Hold which gradients of x, weight and bias are needed, and the weight if autograd does not see it."""

    x: bool
    weight: bool
    bias: bool
    leaf: Tensor | None = None


class Sums:
    """Accumulate the needed gradients of x, weight and bias over the chunks."""

    def __init__(self, wanted: Wanted, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        self.wants_weight, self.wants_bias = wanted.weight, bias is not None and wanted.bias
        self.x = torch.empty_like(x) if wanted.x else None
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None

    def add(self, at: slice, dz: Tensor, x: Tensor, weight: Tensor) -> None:
        if self.x is not None:
            # z = x w^T: dx = dz w for these rows; dw = dz^T x, summed over all rows.
            torch.mm(dz, weight, out=self.x[at])
        if self.wants_weight:
            self.weight = add_mm(self.weight, dz.t(), x[at], wide(weight.dtype))
        if self.wants_bias:
            each = dz.sum(0, dtype=wide(dz.dtype))
            self.bias = each if self.bias is None else self.bias.add_(each)


class Inputs(NamedTuple):
    """Hold the operands of the logits, and the labels of their rows."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    labels: Labels

    def chunks(self, size: int) -> Iterator[slice]:
        return (slice(start, start + size) for start in range(0, len(self.x), size))


def in_turn(
    inputs: Inputs, loss: Loss, how: LossOptions, expected: Tensor, sums: Sums | None
) -> tuple[Tensor, Tensor]:
    """Return the sums of the rows' losses and of their shares; add the gradients to `sums`."""
    x, weight, bias, labels = inputs
    result, share = x.new_zeros((2,), dtype=wide(x.dtype))
    for at in inputs.chunks(how.chunk):
        chunk = Chunk(x[at], weight, bias, labels.rows(at), loss, how)
        terms = chunk.terms()
        result = result + loss.of_rows(terms, chunk.labels).sum()
        share = share + terms.share.sum()
        # Compute gradients while the chunk's logits exist: backward would have to recompute them.
        if sums is not None:
            each = torch.ones_like(terms.total).mul_(expected)
            sums.add(at, chunk.gradients(terms, each), x, weight)
        # Free the chunk before the next one is allocated.
        del chunk
    return result, share


def at_once(
    inputs: Inputs, loss: Loss, how: LossOptions, expected: Tensor, sums: Sums | None
) -> tuple[Tensor, Tensor]:
    """Do the same with one kernel per chunk where all columns are local.

    The kernel reads a row for its loss and overwrites it with the gradient. For small models the two dozen
    small operators that `in_turn` launches per chunk take longer on the host than on the device.
    """
    from autoptd.kernels.cross_entropy_triton import whole_rows_

    x, weight, bias, labels = inputs
    losses = x.new_empty((2 if loss.smoothing else 1, len(x)), dtype=wide(x.dtype))
    hard, soft = 1.0 - loss.smoothing, loss.smoothing / loss.classes
    factors = (expected * hard, expected * soft) if loss.smoothing else (expected, expected)
    for at in inputs.chunks(how.chunk):
        z = linear(x[at], weight, bias)
        whole_rows_(loss, z, labels.rows(at), losses[:, at], None if sums is None else factors)
        if sums is not None:
            sums.add(at, z, x, weight)
        del z
    parts = losses.sum(1)
    result = parts[0] * hard + parts[1] * soft if loss.smoothing else parts[0]
    return result, (~labels.ignored).sum(dtype=wide(x.dtype))
