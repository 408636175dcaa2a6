"""Read the operands of a running frame's next instruction from CPython's value stack.

In: a frame that is about to execute an instruction. Out: the object at a position of its stack, or `NULL`.

    stack = ValueStack()
    at(stack.top(frame), 0)      # before STORE_ATTR: the object whose attribute is set

Python has no API for them. They are in the frame's memory, after its local variables, whose offset is found by
searching for known ones. A Python version on which this was not tested is an error.
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
# Layout of a frame object: the two-word object header, the calling frame, the pointer to its data.
FRAME_DATA = 3 * WORD
# The versions of CPython that tests/trace have run on.
TRIED = ((3, 11), (3, 12), (3, 13))
# Words to search for the local variables.
MOST_WORDS = 24
# These Python versions record the stack depth of a frame while it is traced.
KNOWS_DEPTH = sys.version_info < (3, 12)
NULL = object()
# Types of values in memory.
POINTER, COUNT, OBJECT = ctypes.c_void_p, ctypes.c_int, ctypes.py_object


class ValueStack:
    """Read the stacks of frames; TraceError if the layout of this Python is unknown."""

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
        """Return the content of a local variable's slot; the cell, if inner functions share the variable."""
        return at(_word(id(frame) + FRAME_DATA) + self._locals + (place + 1) * WORD, 0)

    def _depth(self, code: types.CodeType, offset: int) -> int:
        if id(code) not in self._depths:
            self._depths[id(code)] = (code, depths(code))
        return _count_locals(code) + self._depths[id(code)][1][offset]


def at(top: int, place: int) -> Any:
    """Return the value at a position below an address from `ValueStack.top`."""
    try:
        return OBJECT.from_address(top - (place + 1) * WORD).value
    # A null pointer.
    except ValueError:
        return NULL


def depths(code: types.CodeType) -> dict[int, int]:
    """Return the stack depth before each reachable instruction, by offset."""
    steps = list(dis.get_instructions(code))
    following = {one.offset: other.offset for one, other in itertools.pairwise(steps)}
    by_offset = {step.offset: step for step in steps}
    found: dict[int, int] = {}
    # A handler's stack has the exception, and with `lasti` the offset that raised it.
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
            # A generator starts with the value of its first `send` on the stack.
            is_begin = step.opname == "RETURN_GENERATOR"
            effect = 1 if is_begin else dis.stack_effect(step.opcode, arg, jump=False)
            waiting.append((following[offset], depth + effect))
    return found


ENDS = ("RETURN_VALUE", "RETURN_CONST", "RERAISE", "RAISE_VARARGS", "JUMP_FORWARD", "JUMP_BACKWARD")
ENDS += ("JUMP_BACKWARD_NO_INTERRUPT", "INTERPRETER_EXIT")


@cache
def locals_offset() -> int:
    """Return the offset of local variables in a frame, in words, by searching for known ones."""
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
    """Refuse a Python whose frames may have another memory layout."""
    if name == "cpython" and version in TRIED and not has_no_lock:
        return
    shown = f"{name} {'.'.join(map(str, version))}{' without its global lock' if has_no_lock else ''}"
    fact = "what a forward writes to cannot be seen: where this Python keeps its operands is not known"
    raise TraceError(shown, fact, "run it with CPython 3.11, 3.12 or 3.13")


def _own_frame(first: Any, second: Any, third: Any) -> types.FrameType:
    return sys._getframe()


def _count_locals(code: types.CodeType) -> int:
    """Count the slots before the stack: local variables, cells, and free variables."""
    return len({*code.co_varnames, *code.co_cellvars}) + len(code.co_freevars)


def _word(address: int) -> int:
    return POINTER.from_address(address).value or 0


__all__ = ["NULL", "ValueStack", "at", "depths", "locals_offset"]
