"""Cross-entropy of rows of logits whose columns may be split over ranks: what the fused and the unfused operator share.

With M a row's maximum, S the sum of exp(z - M), y its target, w the class weights, e the label smoothing and V the classes:

    loss = (1 - e) w_y (log S - (z_y - M)) + e/V sum_j w_j (log S - (z_j - M))
    dloss/dz_j = ((1 - e) w_y + e/V sum_j w_j) exp(z_j - M) / S - (1 - e) w_y [j = y] - e/V w_j

In: logits [N, n] of the columns that are here, and `Labels`. The softmax is never made: `exponentials` gives exp(z - M), in
the logits' own place if they may be given up, and a few numbers a row (`Terms`), `gradients` makes the gradient of it, in
place again. N numbers are reduced over the ranks for the maximum, and N for each of the sums (Shoeybi et al. 2019, 3).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from autoptd.kernels.forms import tiles

Tensor = torch.Tensor
Reduce = Callable[[Tensor, str], Tensor]  # (numbers of every row, "max" or "sum") -> those over all ranks


@dataclass(frozen=True)
class Labels:
    """The targets of N rows, for one rank: its column (0 if there is none), where there is none, and where it is ignored."""

    column: Tensor
    elsewhere: Tensor
    ignored: Tensor

    def rows(self, at: slice) -> Labels:
        return Labels(self.column[at], self.elsewhere[at], self.ignored[at])


@dataclass(frozen=True)
class Terms:
    """Numbers of N rows, over all ranks. Share: of the divisor of a mean, the target's class weight, 0 where ignored.

    `weighted` is sum_j w_j (z_j - M) and `weights` sum_j w_j; without smoothing they are None.
    """

    maximum: Tensor
    total: Tensor
    picked: Tensor
    share: Tensor
    weighted: Tensor | None = None
    weights: Tensor | None = None


@dataclass(frozen=True)
class Loss:
    """Which cross-entropy: its smoothing, the number of classes, how many columns here are no padding, and the class weights
    of the columns; and how numbers are reduced over the ranks.
    """

    smoothing: float
    classes: int
    real: int
    reduce: Reduce
    weight: Tensor | None = None

    def exponentials(self, z: Tensor, labels: Labels, out: Tensor) -> Terms:
        """out = exp(z - M), 0 in the padding; `out` may be `z`. Return the sums over all ranks."""
        maximum = z[:, : self.real].amax(1) if self.real else z.new_full((len(z),), -torch.inf)
        maximum = self.reduce(maximum, "max")
        picked, total = torch.empty_like(maximum), torch.empty_like(maximum)
        weighted = torch.empty_like(maximum) if self.smoothing else None
        for at in tiles(z):
            part = torch.sub(z[at], maximum[at].unsqueeze(1), out=out[at])
            part[:, self.real :] = -torch.inf
            picked[at] = part.gather(1, labels.column[at].unsqueeze(1)).squeeze(1)
            if weighted is not None:
                real = part[:, : self.real]
                weighted[at] = real.sum(1) if self.weight is None else real @ self.weight[: self.real]
            torch.sum(part.exp_(), 1, out=total[at])
        return self.reduced(maximum, total, picked, weighted, labels)

    def reduced(self, maximum: Tensor, total: Tensor, picked: Tensor, weighted: Tensor | None, labels: Labels) -> Terms:
        """Return the terms over all ranks: one reduction of those of this one, with the maximum of all."""
        sums = [total, picked.masked_fill(labels.elsewhere, 0.0)]
        if self.weight is not None:
            sums.append(self.weight[labels.column].masked_fill(labels.elsewhere, 0.0))
        if weighted is not None:
            weights = total.new_tensor(self.real) if self.weight is None else self.weight[: self.real].sum()
            sums += [weighted, weights.expand(len(total))]
        sums = list(self.reduce(torch.stack(sums), "sum"))
        share = (~labels.ignored).to(total.dtype) if self.weight is None else sums[2]
        return Terms(maximum, sums[0], sums[1], share, *(sums[-2:] if self.smoothing else ()))

    def of_rows(self, terms: Terms, labels: Labels) -> Tensor:
        """Return the loss of every row, 0 where it is ignored."""
        logarithm = terms.total.log()
        loss = (1.0 - self.smoothing) * terms.share * (logarithm - terms.picked)
        if terms.weights is not None:
            loss = loss + self.smoothing / self.classes * (terms.weights * logarithm - terms.weighted)
        return loss.masked_fill(labels.ignored, 0.0)

    def gradients(self, exps: Tensor, terms: Terms, labels: Labels, grad: Tensor, out: Tensor) -> Tensor:
        """out = the gradient of the logits, from exp(z - M) and `grad`, that of every row's loss; `out` may be `exps`."""
        factor, hard, soft = self.factors(terms, labels, grad)
        picked = hard.masked_fill(labels.elsewhere, 0.0).neg_().unsqueeze(1)
        for at in tiles(exps):
            part = torch.mul(exps[at], factor[at].unsqueeze(1), out=out[at])
            part.scatter_add_(1, labels.column[at].unsqueeze(1), picked[at])
            if soft is not None:
                each = soft[at].unsqueeze(1)
                part[:, : self.real] -= each if self.weight is None else each * self.weight[: self.real]
        return out

    def factors(self, terms: Terms, labels: Labels, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return a, b, c of every row, with dz_j = a exp(z_j - M) - b [j = y] - c w_j."""
        grad = grad.masked_fill(labels.ignored, 0.0)  # before any product: a mean over no valid row sends infinity
        hard = (1.0 - self.smoothing) * terms.share * grad
        if terms.weights is None:
            return hard / terms.total, hard, None
        soft = self.smoothing / self.classes * grad
        return (hard + soft * terms.weights) / terms.total, hard, soft
