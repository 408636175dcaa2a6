"""Find outside state that a function reads and a program may change later: class attributes, objects,
reassigned globals.

In: the backward of a custom autograd function, as Python code; functions that it calls are checked as well.
Out: the name of the first such state, "" for none. A trace made with `AuxLoss.scale = 0.0` would keep that
value forever.

    outside_state(AuxLoss.backward)      # "AuxLoss.scale"
"""

from __future__ import annotations

import dis
import enum
import types
from collections.abc import Iterator
from typing import Any

import torch

from autoptd.subject.contents import PLAIN

# Values that cannot change, though their name may be rebound.
FIXED = PLAIN
MUTABLE = (torch.Tensor, dict, list, set, bytearray)
LIBRARIES = {
    "torch",
    "math",
    "numpy",
    "builtins",
    "functools",
    "operator",
    "typing",
    "collections",
    "logging",
    "warnings",
}
LOADS = {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF"}
ATTRIBUTES = {"LOAD_ATTR", "LOAD_METHOD"}
NOTHING = object()


def outside_state(function: Any, seen: set[Any] | None = None) -> str:
    """Name some mutable state that `function`, or a function that it calls, reads; "" if there is none."""
    seen = set() if seen is None else seen
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    if code is None or code in seen or _is_library(getattr(function, "__module__", "")):
        return ""
    seen.add(code)
    for name, value, owner in _reads(function, code):
        if isinstance(value, types.FunctionType | types.MethodType | staticmethod | classmethod):
            found = outside_state(value, seen)
            if found:
                return found
        elif _may_change(name, value, owner):
            return name
    return ""


def _reads(function: Any, code: types.CodeType) -> Iterator[tuple[str, Any, Any]]:
    """Yield (dotted name, value, owner) of every global and closed-over name that `code` loads."""
    names = _outside_names(function, code)
    chain: tuple[str, Any, Any] | None = None
    for step in dis.get_instructions(code):
        if chain is not None and step.opname in ATTRIBUTES:
            name, value, _ = chain
            chain = (f"{name}.{step.argval}", getattr(value, step.argval, NOTHING), value)
        elif step.opname in LOADS and step.argval in names:
            chain = (step.argval, names[step.argval], function)
        else:
            chain = None
        if chain is not None:
            yield chain
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _reads(function, inner)


def _outside_names(function: Any, code: types.CodeType) -> dict[str, Any]:
    found = {name: function.__globals__[name] for name in code.co_names if name in function.__globals__}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        # The cell is still unassigned.
        except ValueError:
            found[name] = NOTHING
    return found


def _may_change(name: str, value: Any, owner: Any) -> bool:
    """Tell whether a program may change the value of a name between two steps."""
    if value is NOTHING or callable(value) or isinstance(value, (types.ModuleType, enum.Enum)):
        return False
    # Library objects, such as loggers, are trusted.
    if not isinstance(value, (*FIXED, *MUTABLE)) and _is_library(type(value).__module__):
        return False
    if isinstance(owner, types.ModuleType):
        return not _is_library(owner.__name__)
    # The name belongs to the function's file or to its enclosing function.
    if isinstance(owner, types.FunctionType):
        rebinds = name in _rebound(owner.__globals__)
        return rebinds or not isinstance(value, (*FIXED, tuple, frozenset))
    return not _is_library(getattr(owner, "__module__", None) or type(owner).__module__)


def _rebound(names: dict[str, Any]) -> set[str]:
    """Return the globals that a function or method of the same module assigns."""
    found: set[str] = set()
    pending = [
        value for value in names.values() if getattr(value, "__module__", None) == names.get("__name__")
    ]
    for value in pending:
        methods = list(vars(value).values()) if isinstance(value, type) else [value]
        for method in methods:
            code = getattr(getattr(method, "__func__", method), "__code__", None)
            if code is not None:
                found |= {step.argval for step in dis.get_instructions(code) if step.opname == "STORE_GLOBAL"}
    return found


def _is_library(module: str | None) -> bool:
    return (module or "").split(".")[0] in LIBRARIES
