"""Describe how a tensor lies in its storage, to make it again when the storage has been filled again.

In: a tensor that autograd saves. Out: a `View` in its place, which keeps neither the tensor nor its storage alive.

    view = View(x)
    view.of(value)          # the tensor that lies in the storage of `value` as x did in its own
"""

from __future__ import annotations

import torch
from torch import Tensor


class View:
    """What stands for a tensor: how it lies in its storage."""

    __slots__ = ("_dtype", "_is_conj", "_is_neg", "_view")

    def __init__(self, tensor: Tensor) -> None:
        self._dtype, self._is_conj, self._is_neg = tensor.dtype, tensor.is_conj(), tensor.is_neg()
        self._view = (tensor.storage_offset(), tensor.shape, tensor.stride())

    def of(self, value: Tensor) -> Tensor:
        """Return the tensor that lies like this in the storage of `value`."""
        # By its storage: a view may read complex numbers as pairs of real ones, or conjugate them when it is read. No mode
        # that reads the model's own casts otherwise (`verify`) may read this dtype.
        with torch._C.DisableTorchFunction():
            view = value.new_empty(0, dtype=self._dtype).set_(value.untyped_storage(), *self._view)
        view = torch._conj(view) if self._is_conj else view
        return torch._neg_view(view) if self._is_neg else view

    def take(self) -> Tensor:
        """Return the tensor."""
        raise NotImplementedError
