"""The two operators that read or write the vocabulary, with the vocabulary split over a group of ranks.

In: this rank's rows of the embedding, or its columns of the logits: rank i of t owns [i * n, (i + 1) * n) of V = t * n.
A vocabulary that t does not divide is *padded*: `size` is V, and what lies beyond V is neither looked up nor in the softmax,
nor gets a gradient. Out: `vocab_parallel_embedding` gives a P value (sum it over the group), the cross-entropy an I value.

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
from autoptd.runtime.shards import real_rows
from autoptd.runtime.world import Group

Tensor = torch.Tensor


def vocab_parallel_embedding(
    ids: Tensor, weight: Tensor, group: Group, padding_idx: int = -1, *, size: int = 0
) -> Tensor:
    """Return this rank's part of `F.embedding`: zeros where another rank owns the id.

    Row `padding_idx` (none by default) gets no gradient.
    """
    rows = weight.shape[0]
    local, elsewhere = _localize(ids, rows, group, size)
    padding = padding_idx - group.index * rows
    x = F.embedding(local, weight, padding_idx=padding if padding_idx >= 0 and 0 <= padding < rows else None)
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
    size: int = 0,
    site: str = "",
) -> Tensor:
    """Return `F.cross_entropy` of the whole logits, the same on every rank; the gradient of `logits` is local.

    `logits` is this rank's [N, n] or [N, n, d1, ...], `targets` holds global ids [N, d1, ...], `weight` is this rank's
    slice of the class weights. Logits narrower than float32 are computed in float32; the result has their dtype.
    """
    if targets.is_floating_point():
        raise PlanError(site or "cross_entropy", "targets are class probabilities, not ids", "targets of dtype int64")
    if group.size == 1:
        return F.cross_entropy(
            logits, targets, weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
        )
    classes = logits.movedim(min(1, logits.ndim - 1), -1)
    rows = classes.reshape(-1, classes.shape[-1])
    if rows.dtype not in (torch.float32, torch.float64):
        rows = rows.float()
    if weight is not None:
        weight = weight.to(rows.dtype)
    loss, share = _RowLoss.apply(rows, targets.reshape(-1), weight, group, ignore_index, label_smoothing, size, site)  # type: ignore[no-untyped-call]
    if reduction == "none":
        loss = loss.reshape(targets.shape)
    else:
        loss = loss.sum() / share.sum() if reduction == "mean" else loss.sum()
    return loss.to(logits.dtype)  # type: ignore[no-any-return]


def _localize(ids: Tensor, rows: int, group: Group, size: int) -> tuple[Tensor, Tensor]:
    """Return (ids within this rank's `rows`, mask of the ids that other ranks own, which became 0).

    An id that no rank owns stays out of range, so that the lookup fails on every rank.
    """
    lo, vocabulary = group.index * rows, size or rows * group.size
    elsewhere = (ids >= 0) & (ids < vocabulary) & ((ids < lo) | (ids >= lo + rows))
    local = (ids - lo).masked_fill(elsewhere, 0)
    if real_rows(size, rows, group.index) < rows:  # an id in the padding is nobody's
        local = local.masked_fill(ids >= vocabulary, rows)
    return local, elsewhere


class _RowLoss(torch.autograd.Function):
    """Loss of every row, and the row's share in the divisor of the mean (its target's class weight, 0 where ignored).

    With M the row's maximum, S the sum of exp(x - M), y the target, w the class weights and e the label smoothing:
    loss = (1 - e) w_y (log S - (x_y - M)) + e/V sum_j w_j (log S - (x_j - M)).
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        targets: Tensor,
        weight: Tensor | None,
        group: Group,
        ignore_index: int,
        smoothing: float,
        size: int,
        site: str,
    ) -> tuple[Tensor, Tensor]:
        ignored = targets == ignore_index
        local, elsewhere = _localize(targets.masked_fill(ignored, 0), x.shape[1], group, size)
        real = real_rows(size, x.shape[1], group.index)  # the rest of the columns is padding
        if real < x.shape[1]:
            x = x.clone()
            x[:, real:] = -torch.inf
        local, elsewhere = local.unsqueeze(1), elsewhere | ignored
        x = x - group.all_reduce(x.amax(1), f"{site} maximum", op="max").unsqueeze(1)
        picked = x.gather(1, local).squeeze(1).masked_fill(elsewhere, 0.0)
        p = x.exp()
        sums = [p.sum(1), picked]  # N numbers each, reduced together
        if weight is not None:
            sums.append(weight[local.squeeze(1)].masked_fill(elsewhere, 0.0))
        if smoothing:
            sums.append(x[:, :real].sum(1) if weight is None else x[:, :real] @ weight[:real])
            sums.append((p.new_tensor(real) if weight is None else weight[:real].sum()).expand(len(x)))
        totals = list(group.all_reduce(torch.stack(sums), f"{site} sums"))
        total, picked = totals[:2]
        share = (~ignored).to(x.dtype) if weight is None else totals[2]
        loss = (1.0 - smoothing) * share * (total.log() - picked)
        k = smoothing / (size or x.shape[1] * group.size)
        weights_sum = 0.0
        if smoothing:
            weights_sum = totals[-1]
            loss = loss + k * (weights_sum * total.log() - totals[-2])
        loss = loss.masked_fill(ignored, 0.0)
        ctx.save_for_backward(p.div_(total.unsqueeze(1)), local, elsewhere, ignored, share, weight)
        ctx.smoothing, ctx.k, ctx.weights_sum, ctx.real = smoothing, k, weights_sum, real
        ctx.mark_non_differentiable(share)
        return loss, share

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        p, local, elsewhere, ignored, share, weight = ctx.saved_tensors
        grad = grad.masked_fill(ignored, 0.0)  # before any product: a mean over no valid row sends infinity
        hard = (1.0 - ctx.smoothing) * share * grad
        soft = ctx.k * grad
        dx = p * (hard + soft * ctx.weights_sum).unsqueeze(1)
        dx.scatter_add_(1, local, -hard.masked_fill(elsewhere, 0.0).unsqueeze(1))
        if ctx.smoothing:
            dx[:, : ctx.real] -= soft.unsqueeze(1) if weight is None else soft.unsqueeze(1) * weight[: ctx.real]
        return dx, None, None, None, None, None, None, None
