"""A call of the model, as users write one: a tuple, a mapping or one tensor.

split_call({"input_ids": ids, "labels": ids})     # ((), {"input_ids": ids, "labels": ids})
argument_names(model)                             # ("input_ids", "attention_mask", "labels")
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

# Positional and keyword arguments.
Call = tuple[tuple[Any, ...], dict[str, Any]]


def split_call(example_inputs: Any) -> Call:
    """Return (args, kwargs) of a call given as a tuple, a mapping (a `BatchEncoding` too) or one tensor."""
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, (tuple, list)):
        return tuple(example_inputs), {}
    return (example_inputs,), {}


def argument_names(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the arguments that forward takes by position; () if it has no signature."""
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):
        return ()
    return tuple(item.name for item in parameters if item.kind is item.POSITIONAL_OR_KEYWORD)
