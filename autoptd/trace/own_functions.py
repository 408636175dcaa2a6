"""Register a custom autograd function as one operator, with the user's forward and backward.

In: a class and its arguments. Out: an operator in torch's registry that calls `apply`, so that it is traced,
tested and differentiated like every other one (see `ir/own_functions.py`). Functions that draw random numbers,
write into their arguments, or return other values than tensors are refused.

    operator, given = operator_for(ScaleGradient, (x, 0.5))
    y = operator(*given)                                    # ScaleGradient.apply(x, 0.5)
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from autoptd.compat import FakeTensorMode, OpOverload, TorchDispatchMode, without_modes
from autoptd.errors import TraceError
from autoptd.ir.own_functions import OWN, Own, name_of

NAMESPACE = "autoptd_functions"
LIBRARY = torch.library.Library(NAMESPACE, "DEF")
# torch's original, which is patched while a model is traced.
APPLY = torch.autograd.Function.__dict__["apply"].__func__
OPERATORS: dict[Any, OpOverload] = {}
# Schema types of arguments; arguments of other types become part of the operator.
SCHEMA_TYPES = {bool: "bool", int: "int", float: "float", str: "str"}
REMEDY = "write it with differentiable torch operators"


def operator_for(function: Any, args: tuple[Any, ...]) -> tuple[OpOverload, list[Any]]:
    """Return the operator for a call and its arguments; TraceError if the function is not one of tensors."""
    fixed = tuple((i, arg) for i, arg in enumerate(args) if not _is_given(arg))
    given = [arg for arg in args if _is_given(arg)]
    words = ["Tensor" if isinstance(arg, Tensor) else SCHEMA_TYPES[type(arg)] for arg in given]
    count = _results_of(function, args)
    key = (function, fixed, tuple(words), count)
    if key not in OPERATORS:
        own = Own(function, name_of(function), fixed)
        listed = ", ".join(f"{word} x{i}" for i, word in enumerate(words))
        results = "Tensor" if count == 0 else f"({', '.join(['Tensor'] * count)})"
        name = _unused(re.sub(r"[^A-Za-z0-9]", "_", function.__name__))
        LIBRARY.define(f"{name}({listed}) -> {results}")

        def kernel(*given: Any) -> Any:
            return APPLY(function, *own.arguments(given))

        for dispatch_key in ("Autograd", "CompositeExplicitAutograd"):
            LIBRARY.impl(name, kernel, dispatch_key)
        OPERATORS[key] = getattr(getattr(torch.ops, NAMESPACE), name).default
        OWN[OPERATORS[key]] = own
    return OPERATORS[key], given


def _unused(name: str) -> str:
    """Return an unused operator name: the class's name, with a number only if that is taken."""
    number, made = 1, name
    while hasattr(getattr(torch.ops, NAMESPACE), made):
        number += 1
        made = f"{name}_{number}"
    return made


def _is_given(arg: Any) -> bool:
    return isinstance(arg, Tensor) or type(arg) in SCHEMA_TYPES


def _results_of(function: Any, args: tuple[Any, ...]) -> int:
    """Run forward and backward without values; return the length of forward's tuple, 0 for a tensor."""
    site = f"autograd.Function {function.__name__}"
    with without_modes(), FakeTensorMode(), _Deterministic(site), torch.enable_grad():
        fakes = [_fake(arg) for arg in args]
        versions = [x._version for x in fakes if isinstance(x, Tensor)]
        try:
            made = APPLY(function, *fakes)
            results = list(made) if isinstance(made, tuple) else [made]
            if not all(isinstance(result, Tensor) for result in results):
                raise TraceError(site, "it returns other things than tensors", REMEDY)
            if versions != [x._version for x in fakes if isinstance(x, Tensor)]:
                raise TraceError(site, "it writes into its arguments", "write out of place")
            heads = [result for result in results if result.requires_grad]
            if heads:
                torch.autograd.backward(heads, [torch.ones_like(head) for head in heads])
        except TraceError:
            raise
        except Exception as error:
            fact = f"forward or backward cannot be run without values: {str(error).splitlines()[0]}"
            raise TraceError(site, fact, REMEDY) from error
    return len(results) if isinstance(made, tuple) else 0


def _fake(arg: Any) -> Any:
    if not isinstance(arg, Tensor):
        return arg
    made = torch.empty_strided(arg.shape, arg.stride(), dtype=arg.dtype, device=arg.device)
    return made.requires_grad_(arg.dtype.is_floating_point)


class _Deterministic(TorchDispatchMode):
    """Refuse operators that draw random numbers."""

    def __init__(self, site: str) -> None:
        super().__init__()
        self._site = site

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            fact = f"it draws random numbers ({func}), which ranks would draw each on its own"
            raise TraceError(self._site, fact, "draw them before apply, and pass them as an argument")
        return func(*args, **(kwargs or {}))
