"""The counts that a weighted-mean loss divides by: known from the labels, before the first forward.

In: labels of one microbatch. Out: their count.

    count_labels(torch.tensor([3, -100, 5]), ignore_index=-100)     # tensor(2., dtype=torch.float64)
"""

from __future__ import annotations

import torch


def count_labels(
    targets: torch.Tensor, *, ignore_index: int, weight: torch.Tensor | None = None
) -> torch.Tensor:
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
