"""Widen a model and its calls to float64, for `verify`, and to tell rounding from a fault.

In: the user's model, a call. Out: the same in float64; and `Widen`, under which a model's own casts to float32
become casts to float64.

    with Widen():
        loss = widen_model(model)(*widen_inputs(call))
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from autoptd.compat import tree_map
from autoptd.errors import PlanError
from autoptd.ir.expert_mm import GroupedProducts
from autoptd.subject.attributes import map_attribute_tensors

FLOAT32 = {torch.float32: torch.float64}
# Casts that name their dtype.
CASTS = {
    torch.Tensor.float: torch.float32,
    torch.Tensor.bfloat16: torch.bfloat16,
    torch.Tensor.half: torch.float16,
}


class Widen(GroupedProducts):
    """Turn requests for float32 into float64, so that a model's upcasts do not truncate a float64 check.

    `dtypes` maps the requested dtypes to replace.
    """

    def __init__(self, dtypes: Mapping[torch.dtype, torch.dtype] = FLOAT32) -> None:
        super().__init__(_grouped_product, _is_float64)
        self._dtypes = dtypes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # The tracer calls this to rebuild a constant of the model, which keeps its dtype.
        if func is torch.empty_strided:
            return func(*args, **(kwargs or {}))
        if CASTS.get(func) in self._dtypes:
            return args[0].to(self._dtypes[CASTS[func]])
        # x.to(torch.float32), softmax(x, -1, torch.float32), zeros(..., dtype=torch.float32).
        wide = [self._wide(arg) for arg in args]
        named = {key: self._wide(arg) for key, arg in (kwargs or {}).items()}
        return super().__torch_function__(func, types, wide, named)

    def _wide(self, arg: Any) -> Any:
        return self._dtypes.get(arg, arg) if isinstance(arg, torch.dtype) else arg


def in_float64() -> GroupedProducts:
    """Support grouped matmuls in float64, for which torch has no kernel."""
    return GroupedProducts(_grouped_product, _is_float64)


def _is_float64(x: torch.Tensor) -> bool:
    return x.dtype == torch.float64


def _grouped_product(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Compute a grouped matmul with a matrix per row, independently of the code that ranks run."""
    groups = torch.searchsorted(ends, torch.arange(len(x), device=x.device), right=True)
    return torch.bmm(x.unsqueeze(1), weight[groups]).squeeze(1)


def widen_model(model: nn.Module) -> nn.Module:
    """Return a float64 copy, plain tensor attributes included; tied weights stay tied."""
    try:
        wide = copy.deepcopy(model).double()
        map_attribute_tensors(wide, lambda x: x.double() if x.is_floating_point() else x)
        return wide
    # deepcopy refuses a module that keeps a tensor with a history, as the old weight_norm does.
    except RuntimeError as error:
        fact = f"it cannot be copied: {str(error).splitlines()[0]}"
        raise PlanError("verify", fact, "keep only parameters and buffers on modules") from error


def widen_inputs(call: Any) -> Any:
    def wide(leaf: Any) -> Any:
        return leaf.double() if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    return tree_map(wide, call)


__all__ = ["Widen", "in_float64", "widen_inputs", "widen_model"]
