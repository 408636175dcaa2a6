"""A stand-in for a number that a forward only counts with: it can be added to, and whoever reads it is noticed.

In: the numbers that a call has changed (`Writes.numbers`), and the call. Out: whether the call does anything with them but
add and put back. A counter that only logs (`self.calls += 1`) changes no later call, whatever it stands at: nothing that is
computed and no branch comes from it.

    only_counts(places, call)      # False for `if self.calls > 30`
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from autoptd.trace.contents import Holder, with_values
from autoptd.trace.users import is_writing

# A place that holds a number, and the text that names it in its holder.
Place = tuple[Holder, str]


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


def only_counts(places: Sequence[Place], call: Callable[[], Any]) -> bool:
    """Tell whether a call only adds to the numbers at these places; they are put back."""
    kept = [(holder, holder.kept()) for holder, _ in places]
    stand_ins = [Tally() for _ in places]
    try:
        for (holder, entry), stand_in in zip(places, stand_ins, strict=True):
            holder.restore(with_values(holder, {entry: stand_in}))
        call()
    # Whatever the call raises: with the numbers themselves it has not.
    except Exception:
        return False
    finally:
        for holder, content in kept:
            holder.restore(content)
    return not any(vars(stand_in)["is_read"] for stand_in in stand_ins)


__all__ = ["Place", "Tally", "only_counts"]
