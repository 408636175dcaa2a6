"""Use torch's fused optimizers by default: one pass over parameters, gradients and moments instead of one per operation.

In: the class and keywords given to `pm.optimizer`, the device and the dtypes. Out: whether `fused=True` is added. Some
of torch's classes have such a form; it is used unless the user chose. All ranks decide alike, because copies of a
parameter must stay equal.

    takes_fused(torch.optim.AdamW, [{"lr": 1e-3}], torch.device("cpu"), [torch.float32])    # True

The CPU's fused kernels ignore strides (torch 2.11 to 2.13; CUDA's refuse tensors with different ones). Parameters and
loaded state are contiguous, and `lay_out` makes gradients contiguous before every step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import optim

# Classes with a fused form on the CPU and on CUDA.
FUSED: tuple[type[optim.Optimizer], ...] = (optim.Adam, optim.AdamW, optim.SGD)
# A user who passes one of these has chosen.
CHOICES = ("fused", "foreach", "differentiable", "capturable")


def takes_fused(
    cls: type[optim.Optimizer],
    groups: Iterable[Mapping[str, Any]],
    device: torch.device,
    dtypes: Iterable[torch.dtype],
) -> bool:
    """Tell whether `fused=True` is the default of an optimizer; `groups` are its keywords, and those of each group."""
    if cls not in FUSED or device.type not in ("cpu", "cuda"):
        return False
    if not all(dtype.is_floating_point for dtype in dtypes):
        return False
    for keywords in groups:
        # A learning rate in a tensor is not supported by all fused kernels.
        if isinstance(keywords.get("lr"), torch.Tensor) or any(name in keywords for name in CHOICES):
            return False
    return True


def lay_out(groups: Iterable[Mapping[str, Any]]) -> None:
    """Make the gradients of fused groups contiguous, as their parameters are."""
    for group in groups:
        for parameter in group["params"] if group.get("fused") else ():
            grad = parameter.grad
            if grad is not None and grad.layout is torch.strided and not grad.is_contiguous():
                parameter.grad = grad.contiguous()


__all__ = ["lay_out", "takes_fused"]
