"""The values that an instruction of a running frame is about to take: CPython's value stack, from the top.

In: a frame that stands before an instruction. Out: the object that the instruction finds at a place of its stack, or `NULL`.

    stack = ValueStack()
    at(stack.top(frame), 0)      # before STORE_ATTR: the object whose attribute is set

Python itself does not show them. They lie in the frame's memory, after its local variables: where those begin is found by
looking for known ones. Of a Python that this was not tried on, nothing is read: that is an error.
"""

from __future__ import annotations

import ctypes
import dis
import itertools
import sys
import types
from functools import cache
from sysconfig import get_config_var
from typing import Any

from autoptd.errors import InternalError, TraceError

WORD = ctypes.sizeof(ctypes.c_void_p)
# A frame object: two words of every object, the frame that called it, and where its values are.
FRAME_DATA = 3 * WORD
# The versions of CPython that tests/trace have run on.
TRIED = ((3, 11), (3, 12), (3, 13))
# Before the local variables there are at most so many words.
MOST_WORDS = 24
# A Python that says itself how many values are on the stack, while it is traced.
KNOWS_DEPTH = sys.version_info < (3, 12)
NULL = object()
# How what is read of memory is taken.
POINTER, COUNT, OBJECT = ctypes.c_void_p, ctypes.c_int, ctypes.py_object


class ValueStack:
    """Reads the stacks of frames; TraceError where it is not known how this Python keeps them."""

    def __init__(self) -> None:
        self._locals = locals_offset() * WORD
        self._depths: dict[int, tuple[types.CodeType, dict[int, int]]] = {}

    def top(self, frame: types.FrameType) -> int:
        """Return the address after the topmost value."""
        data: int = POINTER.from_address(id(frame) + FRAME_DATA).value  # type: ignore[assignment]
        if KNOWS_DEPTH:
            return data + self._locals + COUNT.from_address(data + self._locals - WORD).value * WORD
        return data + self._locals + self._depth(frame.f_code, frame.f_lasti) * WORD

    def variable(self, frame: types.FrameType, place: int) -> Any:
        """Return what a place of the local variables holds: of those that inner functions share, the cell."""
        return at(_word(id(frame) + FRAME_DATA) + self._locals + (place + 1) * WORD, 0)

    def _depth(self, code: types.CodeType, offset: int) -> int:
        if id(code) not in self._depths:
            self._depths[id(code)] = (code, depths(code))
        return _count_locals(code) + self._depths[id(code)][1][offset]


def at(top: int, place: int) -> Any:
    """Return the value at a place under an address that `ValueStack.top` gave."""
    try:
        return OBJECT.from_address(top - (place + 1) * WORD).value
    # There is none.
    except ValueError:
        return NULL


def depths(code: types.CodeType) -> dict[int, int]:
    """Return how many values are on the stack before each instruction that can be reached, by its offset."""
    steps = list(dis.get_instructions(code))
    following = {one.offset: other.offset for one, other in itertools.pairwise(steps)}
    by_offset = {step.offset: step for step in steps}
    found: dict[int, int] = {}
    # A handler finds the exception, and with `lasti` the place that it comes from.
    entries: Any = dis.Bytecode(code).exception_entries  # type: ignore[attr-defined]
    waiting = [(0, 0), *((entry.target, entry.depth + entry.lasti + 1) for entry in entries)]
    while waiting:
        offset, depth = waiting.pop()
        if offset in found:
            continue
        found[offset] = depth
        step = by_offset[offset]
        arg = step.arg if step.opcode >= dis.HAVE_ARGUMENT else None
        if step.opcode in dis.hasjrel or step.opcode in dis.hasjabs:
            waiting.append((step.argval, depth + dis.stack_effect(step.opcode, arg, jump=True)))
        if offset in following and step.opname not in ENDS:
            # A generator begins with what its first `send` brings.
            is_begin = step.opname == "RETURN_GENERATOR"
            effect = 1 if is_begin else dis.stack_effect(step.opcode, arg, jump=False)
            waiting.append((following[offset], depth + effect))
    return found


ENDS = ("RETURN_VALUE", "RETURN_CONST", "RERAISE", "RAISE_VARARGS", "JUMP_FORWARD", "JUMP_BACKWARD")
ENDS += ("JUMP_BACKWARD_NO_INTERRUPT", "INTERPRETER_EXIT")


@cache
def locals_offset() -> int:
    """Return how many words of a frame are before its local variables, by looking for known ones there."""
    check_tried(sys.implementation.name, sys.version_info[:2], bool(get_config_var("Py_GIL_DISABLED")))
    first, second, third = object(), object(), object()
    frame = _own_frame(first, second, third)
    data, wanted = _word(id(frame) + FRAME_DATA), [id(first), id(second), id(third)]
    found = []
    for place in range(MOST_WORDS):
        words = [_word(data + (place + i) * WORD) for i in range(3)]
        if words == wanted:
            found.append(place)
    del frame
    if len(found) != 1:
        raise InternalError(
            f"Python {sys.version.split()[0]}", "no way to see what its instructions write to"
        )
    return found[0]


def check_tried(name: str, version: tuple[int, ...], has_no_lock: bool) -> None:
    """Refuse a Python whose frames may lie in memory in another way."""
    if name == "cpython" and version in TRIED and not has_no_lock:
        return
    shown = f"{name} {'.'.join(map(str, version))}{' without its global lock' if has_no_lock else ''}"
    fact = "what a forward writes to cannot be seen: where this Python keeps its operands is not known"
    raise TraceError(shown, fact, "run it with CPython 3.11, 3.12 or 3.13")


def _own_frame(first: Any, second: Any, third: Any) -> types.FrameType:
    return sys._getframe()


def _count_locals(code: types.CodeType) -> int:
    """Local variables, cells of those that inner functions read, and cells from outside: before the stack."""
    return len({*code.co_varnames, *code.co_cellvars}) + len(code.co_freevars)


def _word(address: int) -> int:
    return POINTER.from_address(address).value or 0


__all__ = ["NULL", "ValueStack", "at", "depths", "locals_offset"]
