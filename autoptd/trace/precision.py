"""Hold a model in the dtype that it is to compute in, for as long as it is compiled.

In: the user's model, and the precision of the request. Out: the same model, whose parameters and floating-point
buffers have that dtype inside a `with` block, as `model.to(dtype)` would give them; behind it they are the user's own
again, to the bit. Tensors that share memory still do.

    with computing_in(model, "bf16"):
        program = compile_program(model, ...)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from autoptd.errors import PlanError
from autoptd.trace.autocast import Autocast

# The dtype of `model.to(dtype)`, and of autocast, by the keyword `precision`.
COMPUTE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
AUTOCAST_DTYPES = {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}


def check_precision(model: nn.Module, precision: str | None) -> None:
    """Raise PlanError where a model's parameters cannot be the float32 storage that `precision` keeps."""
    if precision is None:
        return
    narrow = COMPUTE_DTYPES.get(precision)
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and parameter.dtype not in (torch.float32, narrow):
            fact = f"{name} is {str(parameter.dtype).removeprefix('torch.')}: its storage would be float32"
            raise PlanError(f"precision={precision!r}", fact, "a float32 model, or precision=None")


def autocast_of(model: nn.Module, precision: str | None, device_type: str) -> Autocast:
    """Return the autocast under which a model is traced for ranks on devices of a type; `OFF` without a "-mixed"."""
    device = next((x.device.type for x in model.parameters()), "cpu")
    # Without data there is no device whose state of autocast the model could read.
    return Autocast(device_type, AUTOCAST_DTYPES.get(str(precision)), "cpu" if device == "meta" else device)


@contextmanager
def computing_in(model: nn.Module, precision: str | None) -> Iterator[None]:
    """Hold the parameters and floating-point buffers of `model` in the dtype of `precision` for a while.

    Those of 64 bits stay as they are: with them, `verify` compares every way a number goes, at full width.
    """
    if precision not in COMPUTE_DTYPES:
        yield
        return
    cast = _Cast(COMPUTE_DTYPES[precision])
    parameters = [(x, x.data, x.grad) for x in model.parameters() if x.is_floating_point()]
    buffers = [
        (module, name, x)
        for module in model.modules()
        for name, x in module._buffers.items()
        if x is not None and x.is_floating_point()
    ]
    try:
        for parameter, data, _ in parameters:
            # A gradient of another dtype than its parameter is refused.
            parameter.grad = None
            parameter.data = cast(data)
        for module, name, buffer in buffers:
            module._buffers[name] = cast(buffer)
        yield
    finally:
        for parameter, data, grad in parameters:
            parameter.data = data
            parameter.grad = grad
        for module, name, buffer in buffers:
            module._buffers[name] = buffer


class _Cast:
    """Casts tensors storage by storage, so that what was one memory before is one after it."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.storages: dict[int, torch.Tensor] = {}

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.is_complex() or x.dtype in (torch.float64, self.dtype):
            return x
        storage = x.detach().untyped_storage()
        if storage._cdata not in self.storages:
            count = storage.nbytes() // x.element_size()
            self.storages[storage._cdata] = x.detach().as_strided((count,), (1,), 0).to(self.dtype)
        whole = self.storages[storage._cdata]
        return whole.as_strided(x.size(), x.stride(), x.storage_offset())


__all__ = ["COMPUTE_DTYPES", "autocast_of", "check_precision", "computing_in"]
