"""What caches of functions (`functools.lru_cache`) hold: an object that a forward finds there and changes is state as well.

In: such a function. Out: whether a block has put something into its cache; its results, of which Python shows only the number.

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

# Objects in objects that are looked through for a tensor.
DEEPEST = 4


class Cache:
    """The cache of a function, and how often something was not in it."""

    def __init__(self, function: _lru_cache_wrapper[Any], line: str, begun: int = 0) -> None:
        self._function, self._line = function, line
        # Less the calls that have begun, for which nothing was found.
        self._count = self._misses() - begun

    def is_filled(self) -> bool:
        """Tell whether something was put into it; one that is full has no more in it than before."""
        # What gives None is called for what it does, once, as a logger's `warning_once` is.
        return self._misses() > self._count and any(x is not None for x in held_in(self._function))

    def change(self) -> Change:
        """Return it as what the forward changes."""
        name = getattr(self._function, "__qualname__", "a function")
        return Change(f"the cache of {name}", "", "", self._line, "is filled, for good,")

    def drop_tables(self) -> None:
        """Empty it where all that it holds are tensors, which the next call makes: one from before would be a constant."""
        held = held_in(self._function)
        if any(_has_tensor(x) for x in held) and not any(_has_object(x) for x in held):
            self._function.cache_clear()
            # This forgets the count as well.
            self._count = 0

    def drop_filled(self) -> None:
        """Empty it where it was filled with tensors since: those of a trace must not stay."""
        if self.is_filled() and any(_has_tensor(x) for x in held_in(self._function)):
            self._function.cache_clear()

    def _misses(self) -> int:
        return self._function.cache_info().misses


def caches_of(kind: type) -> list[_lru_cache_wrapper[Any]]:
    """Return the caches among the methods and properties of a class, which C may call without an instruction that shows it."""
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
    # Its class; of each link of a list, where its size is limited, the key, the result and a class; the dict that finds them.
    # That dict is not for others to write: a link that is taken out of it is freed, and still in the list.
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
    """Tell whether there is more than tensors and containers of them: what somebody may have set."""
    return not all(isinstance(x, (Tensor, list, tuple, dict, *PLAIN)) for x in _within(value))


def _within(value: Any, depth: int = 0) -> Iterator[Any]:
    """Yield a value, and what it holds."""
    yield value
    is_end = isinstance(value, (Tensor, nn.Module, type, types.ModuleType, *PLAIN)) or depth > DEEPEST
    if not is_end and has_entries(value):
        items = list(value) if isinstance(value, (list, tuple)) else list(entries_of(value).values())
        for item in items:
            yield from _within(item, depth + 1)


__all__ = ["Cache", "caches_of", "held_in"]
