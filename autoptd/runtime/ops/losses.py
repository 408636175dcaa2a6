"""The counts that a weighted-mean loss divides by, known from the labels, before the first forward; and the loss of all ranks.

In: labels of one microbatch; what a rank computed of the loss. Out: their count; the sum.

    count_labels(torch.tensor([3, -100, 5]), ignore_index=-100)     # tensor(2., dtype=torch.float64)
    total = sum_loss(world, own)                                    # a collective
"""

from __future__ import annotations

import torch

from autoptd.runtime.world.world import World


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


def sum_loss(world: World, own: torch.Tensor) -> torch.Tensor:
    """Return the sum of `own` (0-d, float64) over all ranks that compute a part of the loss; a collective.

    The flags of the ranks (`runtime/world/flags.py`) are sent with it, and need an extra round only over tp.
    """
    mesh, flags = world.mesh, world.flags
    sent = own if flags is None else torch.stack([own, flags.mine()])
    # Not over the other axes: tensor ranks compute the same loss.
    total = world.hops(mesh.loss_axes).all_reduce(sent, "loss")
    if flags is not None:
        total, told = total.unbind()
        others = tuple(axis for axis in mesh.axes if axis not in mesh.loss_axes)
        flags.look(world.hops(others).all_reduce(told, "loss"))
    return total
