"""Detect state that a forward only adds to, a number or a list, by stand-ins that notice being read.

In: the places of numbers and lists that a call has changed (`Writes.logged`), and the call. Out: whether the
call only adds to them. Pure logging (`self.calls += 1`, `history.append(n)`) does not affect later calls: no
computation and no branch depends on it.

    only_logs(places, call)      # False for `if self.calls > 30`
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from autoptd.subject.contents import Holder, with_values
from autoptd.trace.users import is_users, is_writing

# A holder, the text that names the place in it, and the list there; None for a number.
Place = tuple[Holder, str, Any]


# Levels of nesting to search in arguments.
DEEPEST = 8


class Read(Exception):
    """Signal that the value of a stand-in was read."""


class Tally:
    """Return itself for additions; every other operation counts as a read."""

    def __init__(self) -> None:
        self.is_read = False

    def _add(self, other: Any) -> Tally:
        return self

    def _read(self, *args: Any) -> Any:
        self.is_read = True
        raise Read

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        # Our own recorder, and nn.Module's attribute assignment, are not reads of the forward.
        if is_writing(sys._getframe(1).f_code):
            return Tally
        return self._read()  # type: ignore[no-any-return]

    __add__ = __radd__ = __iadd__ = __sub__ = __isub__ = _add
    __bool__ = __int__ = __float__ = __complex__ = __index__ = __round__ = __trunc__ = __floor__ = (
        __ceil__
    ) = _read
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __hash__ = _read  # type: ignore[assignment]
    __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = (
        _read
    )
    __pow__ = __rpow__ = __rsub__ = __neg__ = __pos__ = __abs__ = __invert__ = __divmod__ = __rdivmod__ = (
        _read
    )
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = __lshift__ = __rlshift__ = __rshift__ = _read
    __rrshift__ = __matmul__ = __rmatmul__ = __getitem__ = __len__ = __iter__ = __contains__ = __call__ = (
        _read
    )
    __repr__ = __str__ = __format__ = __reduce_ex__ = __reduce__ = __getattr__ = __dir__ = _read  # type: ignore[assignment]


class Log(Tally):
    """Accept additions to a list and drop them."""

    def append(self, value: Any) -> None:
        pass

    def extend(self, values: Any) -> None:
        list(values)

    appendleft, extendleft = append, extend
    __add__ = __radd__ = __sub__ = __rsub__ = __isub__ = Tally._read


# Lets a sequence pattern of a `match` statement read the length, and be noticed.
Sequence.register(Log)  # type: ignore[attr-defined]


def note_reading(function: Any, args: Iterable[Any]) -> None:
    """Count logs passed to a call as read: C code checks for lists in ways that a stand-in cannot see."""
    called = getattr(function, "__func__", function)
    # The user's code is watched separately, and adding is not a read.
    is_seen = isinstance(called, types.FunctionType) and (
        is_users(called.__code__) or is_writing(called.__code__)
    )
    if not is_seen:
        for log in _logs_in(args, 0):
            log.is_read = True


def _logs_in(values: Iterable[Any], depth: int) -> Iterator[Log]:
    for value in values:
        kind = type(value)
        if kind is Log:
            yield value
        elif kind in (list, tuple, dict) and depth < DEEPEST:
            yield from _logs_in(value.values() if kind is dict else value, depth + 1)


def only_logs(places: Sequence[Place], call: Callable[[], Any]) -> bool:
    """Tell whether a call only adds to the values at these places; restore them afterwards."""
    kept = [(holder, holder.kept()) for holder, _, _ in places]
    # A list with several names gets one stand-in.
    logs = {id(held): Log() for _, _, held in places if held is not None}
    stand_ins = [Tally() if held is None else logs[id(held)] for _, _, held in places]
    try:
        for (holder, entry, _), stand_in in zip(places, stand_ins, strict=True):
            holder.restore(with_values(holder, {entry: stand_in}))
        call()
    # Any error comes from the stand-ins: the call has run with the real values.
    except Exception:
        return False
    finally:
        for holder, content in kept:
            holder.restore(content)
    return not any(vars(stand_in)["is_read"] for stand_in in stand_ins)


__all__ = ["Log", "Place", "Tally", "note_reading", "only_logs"]
