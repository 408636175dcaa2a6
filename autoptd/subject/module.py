"""Check a model before it is traced: it must be a plain module on one device, without quantised weights.

    check_module(model)
    check_device(model, args, kwargs)

Quantised weights are refused, since ranks cannot divide packed integers and their scales. They are recognized
by the names of classes and tensors, without importing their packages: bitsandbytes (`Linear4bit`,
`Linear8bitLt`, `quant_state`), torchao (subclasses of Tensor), GPTQ and AWQ (`qweight`), HQQ (`W_q`),
compressed-tensors (`weight_packed`), torch.ao, any linear layer whose weight has 8 bits (EETQ, FP8), and
`is_quantized` of transformers.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from autoptd.compat import FakeTensor, tree_flatten
from autoptd.errors import PlanError, TraceError, a_type
from autoptd.subject.storage import check_state_dict, check_storage

UNDIVIDED = "pass the model before it is divided; t, p, d and zero=1 of parallelize divide it"


def check_module(model: nn.Module) -> None:
    """Refuse anything but a plain module with a plain state dict, quantised weights, and parameters that
    share memory, which a copy would not.
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
            fact = "is wrapped by DistributedDataParallel, which would sum gradients again"
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
                    name,
                    "is a DTensor: fully_shard, or another tool, has already divided the model",
                    UNDIVIDED,
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
    """Tell whether the model can run: no parameter is on meta, or fake (subject/match_folder.py)."""
    return not any(p.is_meta or isinstance(p, FakeTensor) for p in model.parameters())


# By the names of classes, those of bases too.
BITSANDBYTES = {"Linear4bit", "Linear8bitLt", "Params4bit", "Int8Params"}
# By the names of tensors with packed integers.
PACKED = {"qweight": "GPTQ or AWQ", "W_q": "HQQ", "weight_packed": "compressed-tensors"}


def check_quantised(model: nn.Module) -> None:
    """Raise TraceError for a model with quantised weights."""
    found = [(path, module, how) for path, module in model.named_modules() if (how := quantised_by(module))]
    if not found and (how := _said_by(model)):
        found = [("", model, how)]
    if not found:
        return
    path, module, how = found[0]
    more = len(found) - 1
    others = f", as are those of {more} more module{'s' * (more > 1)}" if more else ""
    fact = f"is {a_type(module)}, whose weights are quantised by {how}{others}: packed integers cannot be divided"
    remedy = "load the base model without quantization_config, in bfloat16: frozen weights need no gradients or optimizer state"
    raise TraceError(path or "model", fact, remedy)


def quantised_by(module: nn.Module) -> str:
    """Return the package that has quantised a module's own weights, "" if they are plain."""
    tensors = dict(_own_tensors(module))
    kinds = [type(module), *map(type, tensors.values())]
    bases = {base for kind in kinds for base in kind.__mro__}
    if {base.__name__ for base in bases} & BITSANDBYTES or any(map(_has_quant_state, tensors.values())):
        return "bitsandbytes"
    if any(base.__module__.partition(".")[0] == "torchao" for base in bases):
        return "torchao"
    if type(module).__module__.startswith("torch.ao.nn.quantized"):
        return "torch.ao"
    for name, package in PACKED.items():
        if name in tensors and not tensors[name].is_floating_point():
            return package
    weight = tensors.get("weight")
    if weight is not None and hasattr(module, "in_features") and _has_8_bits(weight.dtype):
        return f"a package that stores them in {str(weight.dtype).removeprefix('torch.')}"
    return ""


def _said_by(model: nn.Module) -> str:
    """Return the quantization method of a transformers model, "" for others."""
    for module in model.modules():
        method = getattr(module, "quantization_method", None)
        if method is not None and getattr(module, "is_quantized", False) is True:
            return str(getattr(method, "value", method))
    return ""


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters, buffers and plain attributes of a module itself."""
    attributes = [(name, x) for name, x in vars(module).items() if isinstance(x, Tensor)]
    for name, x in chain(module._parameters.items(), module._buffers.items(), attributes):
        if x is not None:
            yield name, x


def _has_quant_state(x: Tensor) -> bool:
    return getattr(x, "quant_state", None) is not None


def _has_8_bits(dtype: torch.dtype) -> bool:
    return dtype.itemsize == 1 and dtype != torch.bool
