"""The two operators that read or write the vocabulary, with the vocabulary split over a group of ranks.

In: this rank's rows of the embedding, or its columns of the logits: rank i of t owns [i * n, (i + 1) * n) of V = t * n.
A vocabulary that t does not divide is *padded*: `size` is V, and rows beyond V are not looked up, not in the softmax,
and get no gradient. Out: `vocab_parallel_embedding` gives a P value (sum it over the group), the cross-entropy an I value.

    x = p_to_i(vocab_parallel_embedding(ids, w, tp), tp, site="wte")
    loss = vocab_parallel_cross_entropy(logits, targets, tp, site="loss")

The logits are never gathered: with N rows, N numbers are reduced for the maximum, and N for each of the sums (Shoeybi
et al. 2019, section 3). All options of `F.cross_entropy` with class indices hold. An id outside [0, V) fails as it
does in torch.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from autoptd.errors import PlanError
from autoptd.kernels.cross_entropy import Labels, Loss
from autoptd.kernels.forms import takes_triton, wide
from autoptd.kernels.loss import LossOptions, chunked_loss, linear_cross_entropy
from autoptd.runtime.ops.shards import real_rows
from autoptd.runtime.world.world import Group, SoloGroup

Tensor = torch.Tensor


def vocab_parallel_embedding(
    ids: Tensor, weight: Tensor, group: Group, padding_idx: int = -1, *, size: int = 0
) -> Tensor:
    """Return this rank's part of `F.embedding`: zeros where another rank owns the id.

    Row `padding_idx` (none by default) gets no gradient.
    """
    rows = weight.shape[0]
    local, elsewhere = _localize(ids, rows, group, size)
    # The row's number on this rank: negative or beyond the end where another rank has it.
    padding = padding_idx - group.index * rows
    is_here = padding_idx >= 0 and 0 <= padding < rows
    x = F.embedding(local, weight, padding_idx=padding if is_here else None)
    return x if group.size == 1 else x.masked_fill(elsewhere.unsqueeze(-1), 0.0)


def vocab_parallel_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    group: Group,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    weight: Tensor | None = None,
    total: Tensor | float | None = None,
    size: int = 0,
    site: str = "",
) -> Tensor:
    """Return `F.cross_entropy` of the whole logits, the same on every rank; the gradient of `logits` is local.

    `logits` is this rank's [N, n] or [N, n, d1, ...], `targets` holds global ids [N, d1, ...], `weight` is this rank's
    slice of the class weights; a mean divides by `total`, by default its own count. Logits narrower than float32 are
    computed in float32; the result has their dtype. PlanError for class probabilities.
    """
    if targets.is_floating_point():
        raise PlanError(
            site or "cross_entropy", "targets are class probabilities, not ids", "targets of dtype int64"
        )
    if group.size == 1 and total is None:
        return F.cross_entropy(
            logits,
            targets,
            weight,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
        )
    # torch has the classes in dim 1 (dim 0 of a single row); the kernels want rows of classes.
    classes = logits.movedim(min(1, logits.ndim - 1), -1)
    rows = classes.reshape(-1, classes.shape[-1])
    # From here on each rank sees its own columns only; `which` reduces a few numbers per row.
    labels = local_labels(targets.reshape(-1), rows.shape[1], group, ignore_index, size)
    which = sharded_loss(rows.shape[1], group, label_smoothing, weight, size, site, rows.dtype)
    loss, share = _RowLoss.apply(rows, labels, which)  # type: ignore[no-untyped-call]
    loss = loss.reshape(targets.shape) if reduction == "none" else loss.sum()
    if reduction == "mean":
        loss = loss / (share.sum() if total is None else total)
    return loss.to(logits.dtype)  # type: ignore[no-any-return]


def cross_entropy(logits: Tensor, targets: Tensor, *, total: Tensor | float, **options: Any) -> Tensor:
    """Return `F.cross_entropy` with a mean that divides by `total`, in float32 where the logits are narrower.

    `options` are those of `vocab_parallel_cross_entropy`.
    """
    return vocab_parallel_cross_entropy(logits, targets, SoloGroup(0), total=total, **options)


def count_labels(targets: Tensor, *, ignore_index: int, weight: Tensor | None = None) -> Tensor:
    """Count the labels that are not `ignore_index`, or sum their class weights (0-d, float64).

    This is the divisor of `F.cross_entropy(..., reduction="mean")`; summed over microbatches and replicas it is that of
    the global batch.
    """
    valid = targets != ignore_index
    if weight is None:
        return valid.sum().double()
    # Class 0 stands in for ignored labels, which may be out of range.
    picked = weight.detach()[torch.where(valid, targets, 0)]
    return (picked * valid).sum().double()


def local_labels(ids: Tensor, columns: int, group: Group, ignore_index: int, size: int) -> Labels:
    """Return the global ids [N] as labels of this rank, which has `columns` columns of the logits."""
    ignored = ids == ignore_index
    local, elsewhere = _localize(ids.masked_fill(ignored, 0), columns, group, size)
    return Labels(local, elsewhere | ignored, ignored)


def sharded_loss(
    columns: int,
    group: Group,
    smoothing: float,
    class_weight: Tensor | None,
    size: int,
    site: str,
    dtype: torch.dtype,
) -> Loss:
    """Return the cross-entropy of logits of `dtype` that have `columns` columns on every rank."""
    if class_weight is not None:
        class_weight = class_weight.to(wide(dtype))
    sites = {"max": f"{site} maximum", "sum": f"{site} sums"}

    def reduce(numbers: Tensor, op: str) -> Tensor:
        return group.all_reduce(numbers, sites[op], op=op)

    classes = size or columns * group.size
    return Loss(smoothing, classes, real_rows(size, columns, group.index), reduce, class_weight)


def _localize(ids: Tensor, rows: int, group: Group, size: int) -> tuple[Tensor, Tensor]:
    """Return (ids within this rank's `rows`, mask of the ids that other ranks own, which became 0).

    An id that no rank owns stays out of range, so that the lookup fails on every rank.
    """
    first, vocabulary = group.index * rows, size or rows * group.size
    elsewhere = (ids >= 0) & (ids < vocabulary) & ((ids < first) | (ids >= first + rows))
    local = (ids - first).masked_fill(elsewhere, 0)
    if real_rows(size, rows, group.index) < rows:
        # An id in the padding would be found: move it out of range.
        local = local.masked_fill(ids >= vocabulary, rows)
    return local, elsewhere


class _RowLoss(torch.autograd.Function):
    """Loss of every row, and the row's share in the divisor of the mean (its target's class weight, 0 where
    ignored).

    Besides the logits there is one tensor of their size: the softmax over this rank's columns, saved for
    backward, which overwrites it with the gradient. torch therefore rejects a second backward through a
    retained graph. The Triton kernel saves the logits themselves, and reads them again.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Labels, loss: Loss) -> tuple[Tensor, Tensor]:
        ctx.triton = takes_triton("triton", logits, "cross_entropy") and loss.weight is None
        if ctx.triton:
            from autoptd.kernels.cross_entropy_triton import terms as terms_of

            softmax = logits.contiguous()
            terms = terms_of(loss, softmax, labels)
        else:
            z = logits.to(wide(logits.dtype))
            softmax = torch.empty_like(z) if z.dtype == logits.dtype else z
            terms = loss.shares(z, labels, out=softmax)
        ctx.save_for_backward(softmax)
        ctx.how, ctx.dtype = (terms, labels, loss), logits.dtype
        # A copy: a result that its own graph holds would never be freed.
        share = terms.share.clone()
        ctx.mark_non_differentiable(share)
        return loss.of_rows(terms, labels), share

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        (softmax,) = ctx.saved_tensors
        terms, labels, loss = ctx.how
        if ctx.triton:
            from autoptd.kernels.cross_entropy_triton import gradients

            return gradients(loss, softmax, terms, labels, grad), None, None
        return loss.gradients(softmax, terms, labels, grad, out=softmax).to(ctx.dtype), None, None


def vocab_parallel_linear_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, group: Group, *, size: int = 0, site: str = "", **options: Any
) -> Tensor:
    """Return the cross-entropy of the whole logits x weight^T + bias, of x [..., h], weight [n, h] and targets [...].

    It equals `vocab_parallel_cross_entropy(F.linear(x, weight), targets, group)`, but the logits of all rows never exist at
    once (`kernels/loss.py`): each chunk of N rows takes two reductions, of N numbers for the maximum, and of N for each of
    the sums. x is of type R: its gradient is a partial sum on each rank. `size` is V where the group does not divide it. The
    options are those of `LossOptions`, with this rank's part [n] of `bias` and `class_weight`.
    """
    if targets.is_floating_point():
        raise PlanError(
            site or "cross_entropy", "targets are class probabilities, not ids", "targets of dtype int64"
        )
    # No reduction between chunks, and ids need not be mapped to columns of this rank.
    if group.size == 1:
        return linear_cross_entropy(x, weight, targets, **options)
    how = LossOptions(**options)
    # The rows of the head's weight are columns of the logits: this rank's n of V. Chunks follow from n, which is equal on
    # all ranks: their reductions must pair up.
    columns = len(weight)
    labels = local_labels(targets.reshape(-1), columns, group, how.ignore_index, size)
    loss = sharded_loss(columns, group, how.label_smoothing, how.class_weight, size, site, x.dtype)
    return chunked_loss(x, weight, labels, loss, how, targets.shape)
