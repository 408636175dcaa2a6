"""Save the buffers of a model before a call, restore them after it, and compare their values."""

from __future__ import annotations

import math

import torch
from torch import nn

from autoptd.ir.buffers import same_entries


class KeptBuffers:
    """Save the buffers of a model, to restore them after a forward that may write to them."""

    def __init__(self, model: nn.Module) -> None:
        self._tensors = dict(model.named_buffers())
        self._values = {name: buffer.detach().clone() for name, buffer in self._tensors.items()}

    def put_back(self) -> dict[str, torch.Tensor]:
        """Restore the buffers that have changed; return their changed values."""
        changed: dict[str, torch.Tensor] = {}
        for name, buffer in self._tensors.items():
            # The forward may have added a value with a gradient.
            if buffer.grad_fn is not None:
                buffer.detach_()
            if not _equal(self._values[name], buffer):
                changed[name] = buffer.clone()
                buffer.copy_(self._values[name])
        return changed


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the largest difference of two values of a buffer, relative to its largest entry."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return math.inf
    if one.is_floating_point() or one.is_complex():
        gap = (one - other).abs().nan_to_num(0.0)
        return float(gap.max() / one.abs().nan_to_num().max().clamp(min=1e-30)) if one.numel() else 0.0
    return 0.0 if torch.equal(one, other) else math.inf


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    has_nan = one.is_floating_point() and one.dtype.itemsize > 1
    return torch.equal(one.nan_to_num(), other.nan_to_num()) if has_nan else same_entries(one, other)


__all__ = ["KeptBuffers", "distance"]
