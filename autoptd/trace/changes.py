"""Changes of Python state by a forward: how values are compared, what counts as a change, and how it is refused.

In: entries of a holder (`subject/contents.py`) before and after a call. Out: those that differ as a forward would see
them.

    differing({"['n']": 0}, {"['n']": 1})                           # [("['n']", 0, 1)]
    Change("layers.0.calls", "0", "1", "net.py:41").refuse()
    # TraceError: layers.0.calls (net.py:41): is changed by the forward (0 before it, 1 after it), ...

Two kinds of state are not in any holder. The process-wide random generators of Python and NumPy are identified by a
number that changes with a draw. A function cache (`functools.lru_cache`) is watched by its misses; Python's API does
not expose the results that it holds, which are state if a forward changes them.

    random_states()                                                 # {"random": 81238, "numpy.random": 5513}
    held_in(get_counter)                                            # [<Counter>]
"""

from __future__ import annotations

import gc
import random
import sys
import types
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import _lru_cache_wrapper, partial
from typing import Any

from torch import Tensor, nn

from autoptd.errors import TraceError, a_type
from autoptd.subject.contents import (
    CONTAINERS,
    MISSING,
    PLAIN,
    Cell,
    Entries,
    entries_of,
    has_entries,
    is_numpy,
    is_opaque,
    slots_of,
)

RANDOM = {"random": "Python's random module", "numpy.random": "numpy's random numbers"}


def random_states() -> dict[str, int]:
    """Identify the states of generators whose draws a graph would freeze to one outcome."""
    states = {"random": hash(random.getstate())}
    if "numpy" in sys.modules:
        drawn = sys.modules["numpy"].random.get_state()
        states["numpy.random"] = hash((drawn[1].tobytes(), *drawn[2:]))
    return states


STATELESS = (
    "keep no Python state in forward: count in the training loop, and pass what the model needs as an input"
)


@dataclass(frozen=True)
class Change:
    """Describe a value that a call has changed: its `path` (`layers.0.calls`) and the `line` of the write."""

    path: str
    before: str
    after: str
    line: str = ""
    how: str = "is changed"
    remedy: str = STATELESS

    def refuse(self) -> TraceError:
        """Make the error for this change."""
        if self.path in RANDOM:
            fact = f"the forward draws from {RANDOM[self.path]} (LayerDrop does): the traced graph would repeat one outcome"
            return TraceError(
                "model", fact, "switch it off (layerdrop=0), or draw outside and pass the numbers as an input"
            )
        values = f" ({self.before} before it, {self.after} after it)" if self.before or self.after else ""
        values = "" if " 0x" in values else values
        fact = f"{self.how} by the forward{values}, which the traced graph would not do"
        return TraceError(f"{self.path} ({self.line})" if self.line else self.path, fact, self.remedy)


def of_weights(made: list[Change]) -> Change:
    """Describe caches as a change where one depends on weights: the trace recomputes it in every step."""
    named = dict.fromkeys(change.path for change in made if not change.path.startswith("["))
    paths = ", ".join(named) or made[0].path
    remedy = (
        "compute it in every forward, or keep a value of the current weights in a buffer (register_buffer)"
    )
    return Change(paths, "", "", made[0].line, "is computed from the weights once, and kept,", remedy)


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


# Levels of nesting to search for a tensor.
CACHE_LEVELS = 4


class Cache:
    """Watch the cache of a function by its number of misses."""

    def __init__(self, function: _lru_cache_wrapper[Any], line: str, begun: int = 0) -> None:
        self._function, self._line = function, line
        # Without the calls already in progress, whose miss was counted.
        self._count = self._misses() - begun

    def is_filled(self) -> bool:
        """Tell whether something was added to the cache; by misses, as a full cache does not grow."""
        # Functions that return None are called once for a side effect, such as a logger's `warning_once`.
        return self._misses() > self._count and any(x is not None for x in held_in(self._function))

    def change(self) -> Change:
        """Return the filled cache as a change made by the forward."""
        name = getattr(self._function, "__qualname__", "a function")
        return Change(f"the cache of {name}", "", "", self._line, "is filled permanently")

    def drop_tables(self) -> None:
        """Clear a cache of tensors so that the next call makes them: an old one would become a constant."""
        held = held_in(self._function)
        if any(_has_tensor(x) for x in held) and not any(_has_object(x) for x in held):
            self._function.cache_clear()
            # This resets the number of misses as well.
            self._count = 0

    def drop_filled(self) -> None:
        """Clear the cache if tensors were added since: tensors of a trace must not stay."""
        if self.is_filled() and any(_has_tensor(x) for x in held_in(self._function)):
            self._function.cache_clear()

    def _misses(self) -> int:
        return self._function.cache_info().misses


def caches_of(kind: type) -> list[_lru_cache_wrapper[Any]]:
    """Return the cached methods and properties of a class: C code may call them unseen."""
    found: list[_lru_cache_wrapper[Any]] = []
    for base in kind.__mro__:
        for value in vars(base).values():
            function = value.fget if isinstance(value, property) else value
            if isinstance(function, _lru_cache_wrapper):
                found.append(function)
    return found


def held_in(function: _lru_cache_wrapper[Any]) -> list[Any]:
    """Return the results that a cache holds."""
    count = function.cache_info().currsize
    if not count:
        return []
    # Referents: its class; if its size is limited, key, result and class of each list link; the lookup dict.
    # Do not write to that dict: a link removed from it is freed but still in the list.
    found = gc.get_referents(function)
    is_limited = function.cache_parameters()["maxsize"] is not None  # type: ignore[attr-defined]
    if is_limited:
        place = next(i for i, x in enumerate(found) if type(x) is dict and _is_of_links(x))
        return found[2 : place : (place - 1) // count]
    return list(next(x for x in found if type(x) is dict).values())


def _is_of_links(entries: dict[Any, Any]) -> bool:
    return any(type(value).__name__ == "_lru_list_elem" for value in entries.values())


def _has_tensor(value: Any) -> bool:
    return any(isinstance(x, (Tensor, nn.Module)) for x in _within(value))


def _has_object(value: Any) -> bool:
    """Tell whether the value holds more than tensors and containers: objects that may have been modified."""
    return not all(isinstance(x, (Tensor, list, tuple, dict, *PLAIN)) for x in _within(value))


def _within(value: Any, depth: int = 0) -> Iterator[Any]:
    """Yield a value and the values nested in it."""
    yield value
    is_end = isinstance(value, (Tensor, nn.Module, type, types.ModuleType, *PLAIN)) or depth > CACHE_LEVELS
    if not is_end and has_entries(value):
        items = list(value) if isinstance(value, (list, tuple)) else list(entries_of(value).values())
        for item in items:
            yield from _within(item, depth + 1)
