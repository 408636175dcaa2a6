"""A model, its options and its calls in float64: what `verify` trains in their place.

In: the user's model, the options of `parallelize`, a call. Out: the same, widened; and `Widen`, under which a
model's own casts to float32 become casts to float64.

    with Widen():
        loss = widen_model(model)(*widen_inputs(call))
"""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from autoptd.compat import tree_map
from autoptd.errors import PlanError
from autoptd.ir.expert_mm import GroupedProducts
from autoptd.options import Options
from autoptd.trace.attributes import map_attribute_tensors


class Widen(GroupedProducts):
    """Turns requests for float32 into float64: a model's own upcasts must not truncate a float64 check."""

    def __init__(self) -> None:
        super().__init__(_grouped_product, _is_float64)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # The tracer calls this itself: it rebuilds a constant of the model, which keeps its dtype.
        if func is torch.empty_strided:
            return func(*args, **(kwargs or {}))
        if func is torch.Tensor.float:
            return args[0].double()
        # x.to(torch.float32), softmax(x, -1, torch.float32), zeros(..., dtype=torch.float32).
        wide = [torch.float64 if arg is torch.float32 else arg for arg in args]
        named = {key: torch.float64 if arg is torch.float32 else arg for key, arg in (kwargs or {}).items()}
        return super().__torch_function__(func, types, wide, named)


def in_float64() -> GroupedProducts:
    """Let a model multiply groups of float64, for which torch has no kernel."""
    return GroupedProducts(_grouped_product, _is_float64)


def _is_float64(x: torch.Tensor) -> bool:
    return x.dtype == torch.float64


def _grouped_product(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Written out, with a matrix for every row: it shares nothing with what ranks run."""
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


def widen_options(options: Options, model: nn.Module) -> Options:
    """Return options by which the float64 copy gets the plan of the model: bytes are priced as those of
    its dtype.
    """
    sizes = Counter[int]()
    for parameter in model.parameters():
        sizes[parameter.element_size()] += parameter.numel()
    # A bf16 model in float64 has 4 times the bytes. On a machine with 4 times the bandwidth and memory it
    # gets the plan of the bf16 model, which is the one to be proven.
    factor = 8 / sizes.most_common(1)[0][0] if sizes else 1.0
    memory = None if options.memory is None else options.rank_machine.memory * factor
    return replace(options, machine=options.rank_machine.widened(factor), memory=memory)


def widen_inputs(call: Any) -> Any:
    def wide(leaf: Any) -> Any:
        return leaf.double() if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    return tree_map(wide, call)


__all__ = ["Widen", "in_float64", "widen_inputs", "widen_model", "widen_options"]
