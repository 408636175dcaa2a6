"""Find all references to an object: names, attributes, entries and cells.

In: an object. Out: (holder, text that names the place in it) of each; nothing if one of them cannot be
replaced, such as an entry of a tuple.

    places_of(history)      # [(Name(globals(), "history"), ".history")]
"""

from __future__ import annotations

import gc
import types
from typing import Any

from autoptd.subject.contents import Attributes, Cell, Content, Holder, Name

# A record may keep a list of pairs.
MOST_PAIRS = 1


def places_of(value: Any, record: type) -> list[tuple[Holder, str]]:
    """Return all places that hold an object, except variables of frames and what `record` objects keep."""
    owners = [one for one in gc.get_referrers(value) if not isinstance(one, (Content, types.FrameType))]
    known_by = referrers(containers(owners))
    found: list[tuple[Holder, str]] = []
    for owner in owners:
        holders = known_by.get(id(owner), [])
        if _is_kept(owner, holders, record):
            continue
        places = _places_in(owner, holders, value)
        if not places:
            return []
        found += places
    return found


def containers(values: list[Any]) -> list[Any]:
    """Return the values that may hold others, in order or by name."""
    return [value for value in values if isinstance(value, (dict, list, tuple))]


def referrers(values: list[Any]) -> dict[int, list[Any]]:
    """Return the referrers of each value, by its id; one walk over all objects finds them all."""
    found: dict[int, list[Any]] = {id(value): [] for value in values}
    for one in gc.get_referrers(*values):
        for key in found.keys() & set(map(id, gc.get_referents(one))):
            found[key].append(one)
    return found


def _places_in(owner: Any, holders: list[Any], value: Any) -> list[tuple[Holder, str]]:
    if isinstance(owner, types.CellType):
        return [(Cell(owner, ""), "")]
    if type(owner) is list:
        return [(Content(owner), f"[{i}]") for i, one in enumerate(owner) if one is value]
    if isinstance(owner, dict):
        # The `__dict__` of a class is read-only: set its names through the class.
        classes = [one for one in holders if isinstance(one, type)]
        names = [key for key, one in dict.items(owner) if one is value]
        if not all(isinstance(name, str) for name in names):
            return []
        return [(Name(classes[0] if classes else owner, name), f".{name}") for name in names]
    # An object may keep its attributes without a dict, in different ways up to and from Python 3.13.
    names = [name for name, one in getattr(owner, "__dict__", {}).items() if one is value]
    return [(Attributes(owner), f".{name}") for name in names]


def _is_kept(owner: Any, holders: list[Any], record: type, depth: int = 0) -> bool:
    """Tell whether a record keeps a container: its entries, a pair in its list, its holder's `__dict__`."""
    if type(owner) not in (dict, list, tuple):
        return False
    if any(isinstance(one, record) or (isinstance(one, Content) and vars(one) is owner) for one in holders):
        return True
    if type(owner) is not tuple or depth == MOST_PAIRS:
        return False
    known_by = referrers(containers(holders))
    return any(_is_kept(one, known_by.get(id(one), []), record, depth + 1) for one in holders)


__all__ = ["places_of", "referrers"]
