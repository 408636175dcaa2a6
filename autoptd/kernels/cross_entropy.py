"""Compute the cross-entropy of rows of logits whose columns may be split over ranks.

Shared by the fused and the unfused operator. With M a row's maximum, S the sum of exp(z - M), y its target,
w the class weights, e the label smoothing and V the number of classes:

    loss = (1 - e) w_y (log S - (z_y - M)) + e/V sum_j w_j (log S - (z_j - M))
    dloss/dz_j = ((1 - e) w_y + e/V sum_j w_j) exp(z_j - M) / S - (1 - e) w_y [j = y] - e/V w_j

In: this rank's columns of the logits, [N, n], and `Labels`. The softmax of a whole row is never built:
`shares` returns the softmax over the local columns, in place if the logits may be overwritten, and a few
numbers per row reduced over all ranks (`Terms`); `gradients` turns it into the gradient, again in place. The
ranks reduce N numbers for the maximum, and N for each sum (Shoeybi et al. 2019, 3).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from autoptd.kernels.forms import tiles

Tensor = torch.Tensor
# (one number per row, "max" or "sum") -> the numbers reduced over all ranks.
Reduce = Callable[[Tensor, str], Tensor]


@dataclass(frozen=True)
class Labels:
    """Hold the targets of N rows on one rank.

    `column` is the local column of the target (0 if another rank has it), `elsewhere` where another rank has
    it or the target is ignored, `ignored` where the target is ignored.
    """

    column: Tensor
    elsewhere: Tensor
    ignored: Tensor

    def rows(self, at: slice) -> Labels:
        return Labels(self.column[at], self.elsewhere[at], self.ignored[at])


@dataclass(frozen=True)
class Terms:
    """Hold numbers per row, reduced over all ranks, except `here`: the sum of exp(z - M) over local columns.

    `share` is what a row adds to the divisor of a mean: the class weight of its target, 0 where ignored.
    `weighted` is sum_j w_j (z_j - M) and `weights` sum_j w_j; both are None without smoothing.
    """

    maximum: Tensor
    here: Tensor
    total: Tensor
    picked: Tensor
    share: Tensor
    weighted: Tensor | None = None
    weights: Tensor | None = None


@dataclass(frozen=True)
class Loss:
    """Describe a cross-entropy: smoothing, number of classes, number of local columns that are not padding,
    class weights of the local columns, and how numbers are reduced over the ranks.
    """

    smoothing: float
    classes: int
    real: int
    reduce: Reduce
    weight: Tensor | None = None

    def shares(self, z: Tensor, labels: Labels, out: Tensor) -> Terms:
        """Set out = softmax over the local columns, 0 in the padding, and return the terms over all ranks.

        `out` may be `z`.
        """
        # Read before the softmax, which may overwrite z through `out`.
        picked = z.gather(1, labels.column.unsqueeze(1)).squeeze(1)
        weighted = None
        if self.smoothing:
            weighted = (
                z[:, : self.real].sum(1)
                if self.weight is None
                else z[:, : self.real] @ self.weight[: self.real]
            )
        maximum, here = softmax_here(z, self.real, out)
        return self.reduced(maximum, here, picked, weighted, labels)

    def reduced(
        self, maximum: Tensor, here: Tensor, picked: Tensor, weighted: Tensor | None, labels: Labels
    ) -> Terms:
        """Reduce the terms of the local columns over all ranks: the maximum m, the sum of exp(z - m), the
        logit of the target, and sum_j w_j z_j.
        """
        top = self.reduce(maximum, "max")
        # Rescale from this rank's maximum m to the global M: exp(z - m) exp(m - M) = exp(z - M).
        here = here * (maximum - top).exp()
        # Batch all sums into one reduction. One rank has the target's column; the others add 0.
        sums = [here, (picked - top).masked_fill(labels.elsewhere, 0.0)]
        if self.weight is not None:
            sums.append(self.weight[labels.column].masked_fill(labels.elsewhere, 0.0))
        if weighted is not None:
            weights = top.new_tensor(self.real) if self.weight is None else self.weight[: self.real].sum()
            sums += [weighted - weights * top, weights.expand(len(top))]
        sums = list(self.reduce(torch.stack(sums), "sum"))
        share = (~labels.ignored).to(top.dtype) if self.weight is None else sums[2]
        return Terms(top, here, sums[0], sums[1], share, *(sums[-2:] if self.smoothing else ()))

    def of_rows(self, terms: Terms, labels: Labels) -> Tensor:
        """Return the loss of every row, 0 where it is ignored."""
        logarithm = terms.total.log()
        loss = (1.0 - self.smoothing) * terms.share * (logarithm - terms.picked)
        if terms.weights is not None and terms.weighted is not None:
            loss = loss + self.smoothing / self.classes * (terms.weights * logarithm - terms.weighted)
        return loss.masked_fill(labels.ignored, 0.0)

    def gradients(self, softmax: Tensor, terms: Terms, labels: Labels, grad: Tensor, out: Tensor) -> Tensor:
        """Set out = the gradient of the logits, given the result of `shares` and the rows' loss gradients.

        `out` may be `softmax`.
        """
        factor, hard, soft = self.factors(terms, labels, grad)
        # `softmax` sums to 1 over the local columns; times `here` it is exp(z - M).
        factor = (factor * terms.here).unsqueeze(1)
        picked = hard.masked_fill(labels.elsewhere, 0.0).neg_().unsqueeze(1)
        for at in tiles(softmax):
            part = torch.mul(softmax[at], factor[at], out=out[at])
            if soft is not None:
                each = soft[at].unsqueeze(1)
                part[:, : self.real] -= each if self.weight is None else each * self.weight[: self.real]
        # Adds 0 to column 0 where another rank has the target.
        return out.scatter_add_(1, labels.column.unsqueeze(1), picked)

    def factors(self, terms: Terms, labels: Labels, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return a, b, c of every row, with dloss/dz_j = a exp(z_j - M) - b [j = y] - c w_j."""
        # Mask first: the gradient of a mean over no valid rows is infinite.
        grad = grad.masked_fill(labels.ignored, 0.0)
        hard = (1.0 - self.smoothing) * terms.share * grad
        if terms.weights is None:
            return hard / terms.total, hard, None
        soft = self.smoothing / self.classes * grad
        return (hard + soft * terms.weights) / terms.total, hard, soft


def softmax_here(z: Tensor, real: int, out: Tensor) -> tuple[Tensor, Tensor]:
    """Set out = softmax of the first `real` columns, 0 in the others; return the maximum m, sum exp(z - m).

    The sum is computed as the reciprocal of the largest probability: on a CPU `torch.exp` is 30 times slower
    where it underflows.
    """
    maximum, total = z.new_full((len(z),), -torch.inf), z.new_zeros(len(z))
    # A rank may hold nothing but padding.
    for at in tiles(z) if real else []:
        part, share = z[at][:, :real], out[at][:, :real]
        torch.amax(part, 1, out=maximum[at])
        share.copy_(torch.softmax(part, 1)) if out is z else torch.softmax(part, 1, out=share)
        torch.amax(share, 1, out=total[at]).reciprocal_()
        empty = maximum[at].isneginf()
        # All local columns are -inf; other ranks may have finite ones. On CUDA the check would synchronize.
        if empty.device.type != "cpu" or bool(empty.any()):
            share.masked_fill_(empty.unsqueeze(1), 0.0)
            total[at].masked_fill_(empty, 0.0)
    out[:, real:] = 0.0
    return maximum, total
