"""The operator that stands for the call of a layer while a model is traced (`siblings.py`), and the metadata of its results."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autoptd.compat import FakeTensor, FakeTensorMode


@dataclass(frozen=True, slots=True)
class Metadata:
    """Hold the metadata of a fake tensor instead of the tensor: torch copies results that are referenced."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, x: Tensor) -> Metadata:
        return cls(x.shape, x.stride(), x.dtype, x.device)

    def make(self, mode: FakeTensorMode) -> FakeTensor:
        meta = torch.empty_strided(self.size, self.stride, dtype=self.dtype, device="meta")
        return FakeTensor(mode, meta, self.device)

    def empty(self) -> Tensor:
        """Make a tensor under a mode that makes it a fake one."""
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)


# The results of a call of `autoptd::layer`, by its number.
_results: dict[int, list[Metadata]] = {}
_numbers = itertools.count()


@torch.library.custom_op("autoptd::layer", mutates_args=())
def layer(inputs: list[Tensor], number: int) -> list[Tensor]:
    """Stand for the call of a module that is not traced."""
    raise NotImplementedError("autoptd::layer is only traced")


@layer.register_fake
def _(inputs: list[Tensor], number: int) -> list[Tensor]:
    return [one.empty() for one in _results[number]]


def _no_backward(ctx: Any, *grads: Any) -> Any:
    raise NotImplementedError("autoptd::layer is only traced")


layer.register_autograd(_no_backward)
LAYER = torch.ops.autoptd.layer.default


def call_layer(inputs: list[Tensor], outputs: Sequence[Metadata]) -> tuple[list[Tensor], int]:
    """Call `autoptd::layer` with results like `outputs`; return them and the number of the call."""
    number = next(_numbers)
    _results[number] = list(outputs)
    try:
        return LAYER(inputs, number), number
    finally:
        del _results[number]
