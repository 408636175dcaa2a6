"""Encode optimizer values as JSON that restores them exactly: tuples, small tensors, NumPy numbers.

In: a value of an optimizer group, or of a parameter's optimizer state. Out: plain JSON, and the restored
value.

    encode((0.9, 0.95))                 # {"tuple": [0.9, 0.95]}
    decode({"tuple": [0.9, 0.95]})      # (0.9, 0.95)
"""

from __future__ import annotations

import math
import sys
from typing import Any

import torch

from autoptd.errors import PlanError, a_type
from autoptd.runtime.params.parts import dtype_of

PLAIN = (bool, int, str, type(None))


def encode(value: Any, site: str) -> Any:
    """Return a value as JSON; PlanError for one that would not come back."""
    if is_numpy_number(value):
        # Keep the type: a product with a float32 is rounded to float32, one with a Python float is not.
        return {"numpy": value.dtype.name, "value": encode(value.item(), site)}
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, tuple):
        return {"tuple": [encode(item, site) for item in value]}
    if isinstance(value, list):
        return [encode(item, site) for item in value]
    if isinstance(value, torch.Tensor):
        numbers = encode(value.detach().cpu().tolist(), site)
        return {"tensor": numbers, "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {key: encode(item, site) for key, item in value.items()}}
    fact = f"is {a_type(value)}, which a checkpoint cannot hold"
    raise PlanError(site, fact, "numbers, strings, tensors, tuples, lists and dicts of these")


def decode(value: Any) -> Any:
    """Return what `encode` was given."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "float" in value:
        return float(value["float"])
    if "numpy" in value:
        import numpy

        return numpy.dtype(value["numpy"]).type(decode(value["value"]))
    if "tuple" in value:
        return tuple(map(decode, value["tuple"]))
    if "tensor" in value:
        return torch.tensor(decode(value["tensor"]), dtype=dtype_of(value["dtype"]), device="cpu")
    return {key: decode(item) for key, item in value["dict"].items()}


def is_numpy_number(value: Any) -> bool:
    """Tell whether a value is a number of NumPy's, as schedules that are computed by it set as a learning rate."""
    numpy = sys.modules.get("numpy")
    # A long double is none of Python's numbers.
    return (
        numpy is not None
        and isinstance(value, numpy.generic)
        and isinstance(value.item(), (bool, int, float))
    )


def without_numpy(value: Any) -> Any:
    """Return a value for other programs: numbers of NumPy's as Python's, which are read without unpickling code."""
    if isinstance(value, (tuple, list)):
        return type(value)(map(without_numpy, value))
    return value.item() if is_numpy_number(value) else value


__all__ = ["decode", "encode", "without_numpy"]
