"""What a model must be before it is traced: a plain module, on one device.

check_module(model)
check_device(model, args, kwargs)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from autoptd.compat import FakeTensor, tree_flatten
from autoptd.errors import PlanError
from autoptd.trace.attributes import check_state_dict
from autoptd.trace.quantised import check_quantised
from autoptd.trace.storage import check_storage


def check_module(model: nn.Module) -> None:
    """Refuse what is not a plain module with a plain state dict, quantised weights, and parameters that share
    memory: a copy would not show it.
    """
    if not isinstance(model, nn.Module):
        raise PlanError(
            "model", f"is a {type(model).__name__}, not a torch.nn.Module", "pass the module itself"
        )
    if hasattr(model, "_orig_mod"):
        raise PlanError(
            "model", "is wrapped by torch.compile", "pass the module that it wraps: model._orig_mod"
        )
    # Before what is a consequence of it: such a module has more in its state dict, or other tensors.
    check_quantised(model)
    check_storage(model)
    check_state_dict(model)


def check_device(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse a model and example inputs that are not on one device."""
    devices = {p.device for p in model.parameters()}
    if len(devices) > 1:
        raise PlanError(
            "model", f"its parameters are on several devices: {sorted(map(str, devices))}", "model.to(one)"
        )
    for i, leaf in enumerate(tree_flatten((args, kwargs))[0]):
        if isinstance(leaf, torch.Tensor) and devices and leaf.device not in devices:
            home = next(iter(devices))
            fact = f"tensor {i} is on {leaf.device}, the model on {home}"
            raise PlanError("example_inputs", fact, f"move the example inputs to {home} with .to('{home}')")


def has_values(model: nn.Module) -> bool:
    """Tell whether the model can be run: no parameter is on meta, or stands in for one (match_folder.py)."""
    return not any(p.is_meta or isinstance(p, FakeTensor) for p in model.parameters())
