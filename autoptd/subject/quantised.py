"""Refuse a model with quantised weights: ranks cannot divide the stored packed integers and scales.

In: the user's model. Out: nothing, or one TraceError that names the first such module, its kind, and how many there are.

    check_quantised(model)      # TraceError: layers.0.q_proj: is a Linear4bit, weights quantised by bitsandbytes ...

Known by what modules and tensors say of themselves, so that no package of quantisation is imported: bitsandbytes (`Linear4bit`,
`Linear8bitLt`, `quant_state`), torchao (subclasses of Tensor), GPTQ and AWQ (`qweight`), HQQ (`W_q`), compressed-tensors
(`weight_packed`), torch.ao, any linear layer whose weight has 8 bits (EETQ, FP8), and what models of transformers say of
themselves (`is_quantized`).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import torch
from torch import Tensor, nn

from autoptd.errors import TraceError, a_type

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
    fact = (
        f"is {a_type(module)}, whose weights are quantised by {how}{others}: packed integers are not divided"
    )
    remedy = "load the base without quantization_config, in bfloat16: frozen weights have no gradients and no optimizer state"
    raise TraceError(path or "model", fact, remedy)


def quantised_by(module: nn.Module) -> str:
    """Say what has quantised a module's own weights; "" for those that are as torch makes them."""
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
        return f"something that keeps them in {str(weight.dtype).removeprefix('torch.')}"
    return ""


def _said_by(model: nn.Module) -> str:
    """Say what a model of transformers was loaded quantised by; "" for others."""
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


__all__ = ["check_quantised", "quantised_by"]
