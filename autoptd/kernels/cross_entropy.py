"""Cross-entropy of rows of logits whose columns may be split over ranks: what the fused and the unfused
operator share.

With M a row's maximum, S the sum of exp(z - M), y its target, w the class weights, e the label smoothing and
V the classes:

    loss = (1 - e) w_y (log S - (z_y - M)) + e/V sum_j w_j (log S - (z_j - M))
    dloss/dz_j = ((1 - e) w_y + e/V sum_j w_j) exp(z_j - M) / S - (1 - e) w_y [j = y] - e/V w_j

In: logits [N, n] of the columns that are here, and `Labels`. No softmax of the whole row is made: `shares`
gives that of the columns here, in the logits' own place if they may be given up, and a few numbers a row over
all ranks (`Terms`); `gradients` makes the gradient of it, in place again. N numbers are reduced over the
ranks for the maximum, and N for each of the sums (Shoeybi et al. 2019, 3).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from autoptd.kernels.forms import tiles

Tensor = torch.Tensor
# (numbers of every row, "max" or "sum") -> those over all ranks.
Reduce = Callable[[Tensor, str], Tensor]


@dataclass(frozen=True)
class Labels:
    """The targets of N rows, for one rank: its column (0 if there is none), where there is none, and where it
    is ignored.
    """

    column: Tensor
    elsewhere: Tensor
    ignored: Tensor

    def rows(self, at: slice) -> Labels:
        return Labels(self.column[at], self.elsewhere[at], self.ignored[at])


@dataclass(frozen=True)
class Terms:
    """Numbers of N rows over all ranks, but `here`: the sum of exp(z - M) over the columns that are here.

    Share: of the divisor of a mean, the target's class weight, 0 where ignored. `weighted` is sum_j w_j (z_j
    - M) and `weights` sum_j w_j; without smoothing they are None.
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
    """Which cross-entropy: its smoothing, the number of classes, how many columns here are no padding, and
    the class weights of the columns; and how numbers are reduced over the ranks.
    """

    smoothing: float
    classes: int
    real: int
    reduce: Reduce
    weight: Tensor | None = None

    def shares(self, z: Tensor, labels: Labels, out: Tensor) -> Terms:
        """Set out = softmax over the columns here, 0 in the padding.

        `out` may be `z`. Return the terms over all ranks.
        """
        # Before the softmax: `out` may be the memory of z.
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
        """Return the terms over all ranks, from those of the columns here: the maximum m, the sum of exp(z -
        m), the logit of the target, and sum_j w_j z_j.
        """
        top = self.reduce(maximum, "max")
        # From this rank's maximum m to that of all: exp(z - m) exp(m - M) = exp(z - M).
        here = here * (maximum - top).exp()
        # One reduction for all sums. A target has its column on one rank; the others add 0.
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
        """Set out = the gradient of the logits, from `shares` and `grad`, that of every row's loss.

        `out` may be `softmax`.
        """
        factor, hard, soft = self.factors(terms, labels, grad)
        # `softmax` sums to 1 over the columns here: times `here` it is exp(z - M).
        factor = (factor * terms.here).unsqueeze(1)
        picked = hard.masked_fill(labels.elsewhere, 0.0).neg_().unsqueeze(1)
        for at in tiles(softmax):
            part = torch.mul(softmax[at], factor[at], out=out[at])
            if soft is not None:
                each = soft[at].unsqueeze(1)
                part[:, : self.real] -= each if self.weight is None else each * self.weight[: self.real]
        # Where the target is elsewhere, 0 is added to column 0.
        return out.scatter_add_(1, labels.column.unsqueeze(1), picked)

    def factors(self, terms: Terms, labels: Labels, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return a, b, c of every row, with dloss/dz_j = a exp(z_j - M) - b [j = y] - c w_j."""
        # First of all: the gradient of a mean over no valid row is infinite.
        grad = grad.masked_fill(labels.ignored, 0.0)
        hard = (1.0 - self.smoothing) * terms.share * grad
        if terms.weights is None:
            return hard / terms.total, hard, None
        soft = self.smoothing / self.classes * grad
        return (hard + soft * terms.weights) / terms.total, hard, soft


def softmax_here(z: Tensor, real: int, out: Tensor) -> tuple[Tensor, Tensor]:
    """Set out = softmax of the first `real` columns, 0 in the others.

    Return the maximum m, and the sum of exp(z - m).

    That sum is one over the largest share, which saves `torch.exp`: on a CPU it takes 30 times as long where
    it underflows.
    """
    maximum, total = z.new_full((len(z),), -torch.inf), z.new_zeros(len(z))
    # A rank may have padding only.
    for at in tiles(z) if real else []:
        part, share = z[at][:, :real], out[at][:, :real]
        torch.amax(part, 1, out=maximum[at])
        share.copy_(torch.softmax(part, 1)) if out is z else torch.softmax(part, 1, out=share)
        torch.amax(share, 1, out=total[at]).reciprocal_()
        empty = maximum[at].isneginf()
        # Columns of -inf only: other ranks may have better ones. To ask first would make a CUDA device wait.
        if empty.device.type != "cpu" or bool(empty.any()):
            share.masked_fill_(empty.unsqueeze(1), 0.0)
            total[at].masked_fill_(empty, 0.0)
    out[:, real:] = 0.0
    return maximum, total
