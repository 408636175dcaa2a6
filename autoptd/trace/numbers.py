"""Preserve numbers that a forward turns into tensors during tracing on meta, where tensors have no values.

`torch.tensor(-65504.0, device=x.device)` becomes `torch.full((), -65504.0, ...)`, an operator that holds the
number.

    make_tensor((-65504.0,), {"device": "meta"})
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def make_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Call `torch.tensor(*args, **kwargs)`, or `torch.full` for a number on meta."""
    is_number = len(args) == 1 and isinstance(args[0], (bool, int, float))
    if is_number and kwargs.keys() <= {"dtype", "device"} and _is_meta(kwargs.get("device")):
        return torch.full((), args[0], **kwargs)
    return torch.tensor(*args, **kwargs)


def _is_meta(device: Any) -> bool:
    return device is not None and torch.device(device).type == "meta"


__all__ = ["make_tensor"]
