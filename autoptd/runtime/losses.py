"""Counts that a weighted-mean loss divides by: known from the labels, before the first forward."""

from __future__ import annotations

import torch


def count_labels(
    targets: torch.Tensor, *, ignore_index: int, weight: torch.Tensor | None = None
) -> torch.Tensor:
    """Number of labels that are not `ignore_index`, or the sum of their class weights (0-d, float64).

    This is the divisor of `F.cross_entropy(..., reduction="mean")`; summed over microbatches and replicas it is that of the
    global batch.
    """
    valid = targets != ignore_index
    if weight is None:
        return valid.sum().double()
    picked = weight.detach()[torch.where(valid, targets, 0)]
    return (picked * valid).sum().double()
