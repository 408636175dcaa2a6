"""Numbers that a model's forward makes tensors of, while it is traced on meta: a tensor there has no value to be kept.

`torch.tensor(-65504.0, device=x.device)` becomes `torch.full((), -65504.0, ...)`, an operator that says its number.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class NumbersOnMeta(TorchFunctionMode):
    """The time in which a model is traced."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        is_number = func is torch.tensor and len(args) == 1 and isinstance(args[0], (bool, int, float))
        if is_number and given.keys() <= {"dtype", "device"} and _is_meta(given.get("device")):
            return torch.full((), args[0], **given)
        return func(*args, **given)


def _is_meta(device: Any) -> bool:
    return device is not None and torch.device(device).type == "meta"


__all__ = ["NumbersOnMeta"]
