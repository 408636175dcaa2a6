"""Inspect function caches (`functools.lru_cache`): a cached object that a forward changes is state.

In: such a function. Out: whether a block has added to its cache, and the cached results, which Python's API
does not expose.

    cache = Cache(get_counter, "net.py:12")
    get_counter().n += 1
    cache.is_filled()           # True
    held_in(get_counter)        # [<Counter>]
"""

from __future__ import annotations

import gc
import types
from collections.abc import Iterator
from functools import _lru_cache_wrapper
from typing import Any

from torch import Tensor, nn

from autoptd.subject.contents import PLAIN, entries_of, has_entries
from autoptd.trace.change import Change

# Levels of nesting to search for a tensor.
DEEPEST = 4


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
        return Change(f"the cache of {name}", "", "", self._line, "is filled, for good,")

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
    is_end = isinstance(value, (Tensor, nn.Module, type, types.ModuleType, *PLAIN)) or depth > DEEPEST
    if not is_end and has_entries(value):
        items = list(value) if isinstance(value, (list, tuple)) else list(entries_of(value).values())
        for item in items:
            yield from _within(item, depth + 1)


__all__ = ["Cache", "caches_of", "held_in"]
