"""Compare values as a forward would see them, and list the entries of two contents that differ.

In: entries of a holder (`subject/contents.py`) before and after a call. Out: those that differ.

    differing({"['n']": 0}, {"['n']": 1})     # [("['n']", 0, 1)]
"""

from __future__ import annotations

import types
from collections import deque
from functools import partial
from typing import Any

from torch import Tensor, nn

from autoptd.errors import a_type
from autoptd.subject.contents import (
    CONTAINERS,
    MISSING,
    PLAIN,
    Cell,
    Entries,
    entries_of,
    is_numpy,
    is_opaque,
    slots_of,
)

# Levels of nesting to compare in objects that are new at every call.
DEEPEST = 8
# Py_TPFLAGS_HEAPTYPE, which classes made by a class statement have.
OF_PYTHON = 1 << 9
MOST_LETTERS = 60


def differing(before: Entries, after: Entries) -> list[tuple[str, Any, Any]]:
    """Return (entry, value before, value after) of all that differ.

    Tensors count as equal: the code that reads them compares them.
    """
    found = []
    for name in dict.fromkeys([*before, *after]):
        one, other = before.get(name, MISSING), after.get(name, MISSING)
        if not is_same(one, other):
            found.append((name, one, other))
    # The order of a dict may encode the order of use.
    if not found and list(before) != list(after):
        found.append(("", list(before), list(after)))
    return found


def is_same(one: Any, other: Any, depth: int = 0) -> bool:
    """Tell whether two values are equal for a forward: tensors always are, objects if their contents are."""
    if one is other:
        return True
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor)
    if type(one) is not type(other) or depth > DEEPEST:
        return False
    if isinstance(one, PLAIN):
        return repr(one) == repr(other)
    if isinstance(one, (list, tuple, deque)):
        if len(one) != len(other):
            return False
        return all(is_same(*pair, depth + 1) for pair in zip(one, other, strict=True))
    if isinstance(one, frozenset):
        return one == other
    if isinstance(one, types.FunctionType):
        return _is_same_function(one, other, depth)
    if is_numpy(one):
        return one.dtype == other.dtype and one.shape == other.shape and one.tolist() == other.tolist()
    if isinstance(one, (type, types.ModuleType, types.BuiltinFunctionType, nn.Module)):
        return False
    if isinstance(one, partial):
        parts = [(each.func, each.args, *sorted(each.keywords.items())) for each in (one, other)]
        return is_same(parts[0], parts[1], depth + 1)
    if isinstance(one, types.MethodType):
        return one.__self__ is other.__self__ and one.__func__ is other.__func__
    # An object without visible content may be an iterator, for example.
    if not (isinstance(one, CONTAINERS) or is_opaque(one) or hasattr(one, "__dict__") or slots_of(one)):
        return False
    if hasattr(type(one), "__next__"):
        return False
    if isinstance(one, BaseException):
        parts = [(each.args, each.__cause__, each.__context__, vars(each)) for each in (one, other)]
        return is_same(parts[0], parts[1], depth + 1)
    if _hides_something(one):
        return False
    before, after = entries_of(one), entries_of(other)
    return before.keys() == after.keys() and all(
        is_same(before[name], after[name], depth + 1) for name in before
    )


def _hides_something(value: Any) -> bool:
    """Tell whether a value may have hidden content: its class derives from a C class, such as `datetime`."""
    if isinstance(value, (*CONTAINERS, types.SimpleNamespace)) or is_opaque(value):
        return False
    return any(not kind.__flags__ & OF_PYTHON and kind is not object for kind in type(value).__mro__)


def _is_same_function(one: Any, other: Any, depth: int) -> bool:
    if one.__code__ is not other.__code__ or one.__globals__ is not other.__globals__:
        return False
    cells = zip(one.__closure__ or (), other.__closure__ or (), strict=True)
    pairs = [(Cell(a, "").entries()[""], Cell(b, "").entries()[""]) for a, b in cells]
    pairs += [(one.__defaults__, other.__defaults__), (one.__kwdefaults__, other.__kwdefaults__)]
    return all(is_same(*pair, depth + 1) for pair in pairs)


def text_of(value: Any) -> str:
    """Return the text of a value for messages."""
    if isinstance(value, Tensor):
        return "a tensor"
    is_shown = isinstance(value, (*PLAIN, *CONTAINERS, tuple)) or value is MISSING
    return repr(value)[:MOST_LETTERS] if is_shown else a_type(value)


__all__ = ["differing", "is_same", "text_of"]
