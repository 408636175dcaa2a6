"""Torch's fused optimizers by default: one pass over parameters, gradients and moments in place of one per operation.

In: the class and keywords given to `pm.optimizer`, the device and the dtypes. Out: whether `fused=True` is added. Torch has
such a form of some classes; it is taken unless the user said otherwise. All ranks decide alike, for copies of a parameter must
stay equal.

The fused kernels of the CPU read tensors as they lie in memory, whatever their strides (torch 2.11 to 2.13; CUDA's refuse
unlike ones). Parameters and loaded state are contiguous, and `lay_out` makes gradients so before every step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import optim

FUSED: tuple[type[optim.Optimizer], ...] = (optim.Adam, optim.AdamW, optim.SGD)  # on the CPU and on CUDA
CHOICES = ("fused", "foreach", "differentiable", "capturable")  # who says one of these has chosen


def takes_fused(
    cls: type[optim.Optimizer],
    groups: Iterable[Mapping[str, Any]],
    device: torch.device,
    dtypes: Iterable[torch.dtype],
) -> bool:
    """Whether `fused=True` is the default of an optimizer; `groups` are the keywords of all, and those of each group."""
    if (
        cls not in FUSED
        or device.type not in ("cpu", "cuda")
        or not all(one.is_floating_point for one in dtypes)
    ):
        return False
    return not any(
        name in one or isinstance(one.get("lr"), torch.Tensor) for one in groups for name in CHOICES
    )


def lay_out(groups: Iterable[Mapping[str, Any]]) -> None:
    """Make the gradients of fused groups contiguous, as their parameters are."""
    for group in groups:
        for parameter in group["params"] if group.get("fused") else ():
            grad = parameter.grad
            if grad is not None and grad.layout is torch.strided and not grad.is_contiguous():
                parameter.grad = grad.contiguous()


__all__ = ["lay_out", "takes_fused"]
