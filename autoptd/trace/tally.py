"""Stand-ins for what a forward only adds to, a number or a list: whoever reads one is noticed.

In: where the numbers and lists are that a call has changed (`Writes.logged`), and the call. Out: whether the call does anything
with them but add and put back. What only logs (`self.calls += 1`, `history.append(n)`) changes no later call, whatever it
stands at: nothing that is computed and no branch comes from it.

    only_logs(places, call)      # False for `if self.calls > 30`
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from autoptd.subject.contents import Holder, with_values
from autoptd.trace.users import is_users, is_writing

# A place, the text that names it in its holder, and the list that is there; None for a number.
Place = tuple[Holder, str, Any]


# Containers in containers that a call is handed.
DEEPEST = 8


class Read(Exception):
    """A stand-in was asked for its value."""


class Tally:
    """Gives itself where something is added; all else is a reading."""

    def __init__(self) -> None:
        self.is_read = False

    def _add(self, other: Any) -> Tally:
        return self

    def _read(self, *args: Any) -> Any:
        self.is_read = True
        raise Read

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        # Those that look at what is written are not the forward, nor is a module that is given an attribute.
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
    """Takes what is added to a list, and keeps nothing of it."""

    def append(self, value: Any) -> None:
        pass

    def extend(self, values: Any) -> None:
        list(values)

    appendleft, extendleft = append, extend
    __add__ = __radd__ = __sub__ = __rsub__ = __isub__ = Tally._read


# A pattern of a `match` that looks for a list asks for its length.
Sequence.register(Log)  # type: ignore[attr-defined]


def note_reading(function: Any, args: Iterable[Any]) -> None:
    """Note the logs among what a call hands to others: C asks for the class of a list in ways that a stand-in does not see."""
    called = getattr(function, "__func__", function)
    # What the user's code does with it is seen there, and adding is no reading.
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
    """Tell whether a call only adds to what is at these places; it is put back."""
    kept = [(holder, holder.kept()) for holder, _, _ in places]
    # What several names hold has one stand-in.
    logs = {id(held): Log() for _, _, held in places if held is not None}
    stand_ins = [Tally() if held is None else logs[id(held)] for _, _, held in places]
    try:
        for (holder, entry, _), stand_in in zip(places, stand_ins, strict=True):
            holder.restore(with_values(holder, {entry: stand_in}))
        call()
    # Whatever the call raises: with the numbers themselves it has not.
    except Exception:
        return False
    finally:
        for holder, content in kept:
            holder.restore(content)
    return not any(vars(stand_in)["is_read"] for stand_in in stand_ins)


__all__ = ["Log", "Place", "Tally", "note_reading", "only_logs"]
