"""Check a model before it is traced: it must be a plain module on one device.

check_module(model)
check_device(model, args, kwargs)
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from autoptd.compat import FakeTensor, tree_flatten
from autoptd.errors import PlanError, a_type
from autoptd.subject.attributes import check_state_dict
from autoptd.subject.quantised import check_quantised
from autoptd.subject.storage import check_storage

UNDIVIDED = "pass the model before it is divided; t, p, d and zero=1 of parallelize divide it"


def check_module(model: nn.Module) -> None:
    """Refuse anything but a plain module with a plain state dict, quantised weights, and parameters that share
    memory, which a copy would not.
    """
    if not isinstance(model, nn.Module):
        raise PlanError("model", f"is {a_type(model)}, not a torch.nn.Module", "pass the module itself")
    if hasattr(model, "_orig_mod"):
        raise PlanError(
            "model", "is wrapped by torch.compile", "pass the module that it wraps: model._orig_mod"
        )
    check_wrappers(model)
    # First: such a module has extra or other tensors in its state dict, which later checks would report.
    check_quantised(model)
    check_storage(model)
    check_state_dict(model)


def check_wrappers(model: nn.Module) -> None:
    """Refuse a model that another library has divided or copied over ranks already."""
    # A wrapped model has imported these modules already; importing them here would be slow.
    fsdp, tensor = (sys.modules.get(f"torch.distributed.{name}") for name in ("fsdp", "tensor"))
    wrapped = fsdp.FullyShardedDataParallel if fsdp else ()
    for path, module in model.named_modules():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            fact = "is wrapped by DistributedDataParallel, which would sum gradients once more"
            inner = f"{path}.module" if path else "model.module"
            raise PlanError(
                path or "model", fact, f"pass the module that it wraps ({inner}); d= makes the replicas"
            )
        if isinstance(module, wrapped):
            raise PlanError(path or "model", "is wrapped by FullyShardedDataParallel", UNDIVIDED)
    if tensor is not None:
        for name, parameter in model.named_parameters():
            if isinstance(parameter, tensor.DTensor):
                raise PlanError(
                    name, "is a DTensor: fully_shard, or another tool, has divided the model", UNDIVIDED
                )


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
    """Tell whether the model can be run: no parameter is on meta, or stands in for one (subject/match_folder.py)."""
    return not any(p.is_meta or isinstance(p, FakeTensor) for p in model.parameters())
