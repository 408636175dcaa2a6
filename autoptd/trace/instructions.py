"""Call a function before the instructions of the user's Python code, and read their operands.

In: a function `see(frame, name, arg, top)`, and a predicate for the user's code. While the context is open, `see` is
called before every instruction of this thread in such code that may write to something: `name` and `arg` are the
instruction's, `top` is the address after its operands. Code of torch and of this package is skipped.

    with watching(see, is_users, begin) as watch:
        watch.pause()      # code that runs from here on is not watched
        watch.resume()

    at(top, 0)             # before STORE_ATTR: the object whose attribute is set

Python has no API for the operands. They are in the frame's memory, after its local variables, whose offset is found
by searching for known ones. A Python version on which this was not tested is an error.
"""

from __future__ import annotations

import ctypes
import dis
import itertools
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from sysconfig import get_config_var
from typing import Any

from autoptd.errors import InternalError, TraceError
from autoptd.trace.users import is_called_by_user

See = Callable[[types.FrameType, str, int, int], None]
Begin = Callable[[types.FrameType], None]
# Instructions that write, call, or advance an iterator.
NAMES = {"STORE_ATTR", "STORE_SUBSCR", "STORE_SLICE", "STORE_GLOBAL", "STORE_DEREF"}
NAMES |= {"DELETE_ATTR", "DELETE_SUBSCR", "DELETE_GLOBAL", "DELETE_DEREF"}
NAMES |= {"CALL", "CALL_KW", "CALL_FUNCTION_EX", "BINARY_OP", "BINARY_SUBSCR", "LOAD_ATTR", "LOAD_METHOD"}
NAMES |= {"GET_ITER", "GET_YIELD_FROM_ITER", "UNPACK_SEQUENCE", "UNPACK_EX", "CONTAINS_OP"}
NAMES |= {"LIST_EXTEND", "SET_UPDATE", "DICT_UPDATE", "DICT_MERGE"}
# The first in-place operator (`+=`) of BINARY_OP.
FIRST_IN_PLACE = 13
Table = dict[int, tuple[str, int]]


@contextmanager
def watching(
    see: See, is_users: Callable[[types.CodeType], bool], begin: Begin
) -> Iterator[Tracing | Monitoring]:
    """Call `see` before instructions of the user's code that write, call, or advance an iterator, and `begin`
    when code runs for the first time.
    """
    kind = Tracing if sys.version_info < (3, 12) else Monitoring
    watch = kind(see, Tables(is_users, begin))
    watch.start()
    try:
        yield watch
    finally:
        watch.stop()


class Tables:
    """Map code objects to their watched instructions, by offset."""

    def __init__(self, is_users: Callable[[types.CodeType], bool], begin: Begin) -> None:
        self._is_users, self._begin = is_users, begin
        # By id; keeping the code alive keeps its id unique.
        self._known: dict[int, tuple[types.CodeType, Table]] = {}
        # All code that ran, with its globals.
        self.entered: list[tuple[types.CodeType, dict[str, Any]]] = []

    def enter(self, frame: types.FrameType) -> Table:
        known = self._known.get(id(frame.f_code))
        if known is None:
            self.entered.append((frame.f_code, frame.f_globals))
            if self._is_users(frame.f_code):
                self._begin(frame)
            return self.of(frame.f_code)
        return known[1]

    def of(self, code: types.CodeType) -> Table:
        known = self._known.get(id(code))
        if known is None:
            known = self._known[id(code)] = (code, _table(code) if self._is_users(code) else {})
        return known[1]


def _table(code: types.CodeType) -> Table:
    found: Table = {}
    steps, extended, first = code.co_code, 0, None
    for offset in range(0, len(steps), 2):
        op = steps[offset]
        arg = steps[offset + 1] | extended << 8
        if op == dis.EXTENDED_ARG:
            extended, first = arg, offset if first is None else first
            continue
        begins, extended, first = offset if first is None else first, 0, None
        name = dis.opname[op]
        if name in NAMES and _is_looked_at(code, name, arg):
            # Stop at the first EXTENDED_ARG word of an instruction, so that it is seen once.
            found[begins] = (name, arg)
    return found


def _is_looked_at(code: types.CodeType, name: str, arg: int) -> bool:
    if name == "BINARY_OP":
        return arg >= FIRST_IN_PLACE
    if name in ("LOAD_ATTR", "LOAD_METHOD"):
        return attribute_of(code, name, arg) == "__dict__"
    # The call itself creates the cells of its variables.
    if name in ("STORE_DEREF", "DELETE_DEREF"):
        return variable_of(code, arg) in code.co_freevars
    return True


def attribute_of(code: types.CodeType, name: str, arg: int) -> str:
    """Return the name that an instruction refers to by an index into the names of its code."""
    # From Python 3.12 on the lowest bit marks loads of methods.
    if name == "LOAD_ATTR" and sys.version_info >= (3, 12):
        arg >>= 1
    return code.co_names[arg]


def variable_of(code: types.CodeType, arg: int) -> str:
    """Return the name of the cell that an instruction reads or writes."""
    cells = [name for name in code.co_cellvars if name not in code.co_varnames]
    return (*code.co_varnames, *cells, *code.co_freevars)[arg]


class Steps:
    """Trace function that `sys.settrace` calls before every instruction of a code object's frames."""

    def __init__(self, see: See, table: Table) -> None:
        self._see, self._found, self._top = see, table.get, ValueStack().top

    def __call__(self, frame: types.FrameType, event: str, arg: Any) -> None:
        found = self._found(frame.f_lasti)
        if found is not None and event == "opcode":
            self._see(frame, *found, self._top(frame))


class Tracing:
    """Watch instructions with `sys.settrace`, on Python 3.11."""

    def __init__(self, see: See, tables: Tables) -> None:
        self._see, self.tables = see, tables
        # By code that has run; None where it is skipped.
        self._steps: dict[int, Any] = {}
        self._importing: types.FrameType | None = None
        self._before: Any = None
        # C functions: no Python code may run while the trace function is being switched.
        self.pause, self.resume = partial(sys.settrace, None), partial(sys.settrace, self._enter)

    def start(self) -> None:
        self._before = sys.gettrace()
        self.resume()

    def stop(self) -> None:
        sys.settrace(self._before)

    def _enter(self, frame: types.FrameType, event: str, arg: Any) -> Any:
        steps = self._steps.get(id(frame.f_code), self)
        if steps is None or self._importing is not None:
            return None
        if steps is self:
            # Skip code run by imports: the next call finds the module already imported.
            if frame.f_code.co_name == "<module>" and _is_importing(frame):
                self._importing = frame
                frame.f_trace_lines = False
                return self._leave_import
            table = self.tables.enter(frame)
            steps = self._steps[id(frame.f_code)] = Steps(self._see, table).__call__ if table else None
        if steps is None or not is_called_by_user(frame):
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        return steps

    def _leave_import(self, frame: types.FrameType, event: str, arg: Any) -> Any:
        if event == "return":
            self._importing = None
        return self._leave_import


class Monitoring:
    """Watch instructions with `sys.monitoring`, from Python 3.12 on: skipped code costs one callback."""

    def __init__(self, see: See, tables: Tables) -> None:
        self._see, self.tables, self._stack = see, tables, ValueStack()
        self._codes: dict[int, types.CodeType] = {}
        self._thread = threading.get_ident()
        self._pauses = 0
        self._monitoring: Any = sys.monitoring  # type: ignore[attr-defined, unused-ignore]

    def start(self) -> None:
        self._tool = next(tool for tool in (4, 3) if self._monitoring.get_tool(tool) is None)
        events = self._monitoring.events
        self._monitoring.use_tool_id(self._tool, "autoptd")
        for event, call in ((events.PY_START, self._enter), (events.INSTRUCTION, self._step)):
            self._monitoring.register_callback(self._tool, event, call)
        self._monitoring.set_events(self._tool, events.PY_START | events.PY_RESUME)
        self._monitoring.register_callback(self._tool, events.PY_RESUME, self._enter)
        # Report code again that an earlier watch has skipped.
        self._monitoring.restart_events()

    def stop(self) -> None:
        for code in self._codes.values():
            self._monitoring.set_local_events(self._tool, code, 0)
        self._monitoring.set_events(self._tool, 0)
        self._monitoring.free_tool_id(self._tool)

    def pause(self) -> None:
        self._pauses += 1

    def resume(self) -> None:
        self._pauses -= 1

    def _enter(self, code: types.CodeType, offset: int) -> Any:
        if self.tables.enter(sys._getframe(1)) and id(code) not in self._codes:
            self._codes[id(code)] = code
            self._monitoring.set_local_events(self._tool, code, self._monitoring.events.INSTRUCTION)
        return self._monitoring.DISABLE

    def _step(self, code: types.CodeType, offset: int) -> Any:
        found = self.tables.of(code).get(offset)
        if found is None:
            return self._monitoring.DISABLE
        if not self._pauses and threading.get_ident() == self._thread:
            frame = sys._getframe(1)
            if is_called_by_user(frame) and not _is_importing(frame):
                self._see(frame, *found, self._stack.top(frame))
        return None


def _is_importing(frame: types.FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_back is not None:
            return frame.f_back.f_code.co_name == "_call_with_frames_removed"
        frame = frame.f_back
    return False


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
            f"Python {sys.version.split()[0]}", "the operands of its instructions cannot be located"
        )
    return found[0]


def check_tried(name: str, version: tuple[int, ...], has_no_lock: bool) -> None:
    """Refuse a Python whose frames may have another memory layout."""
    if name == "cpython" and version in TRIED and not has_no_lock:
        return
    shown = f"{name} {'.'.join(map(str, version))}{' without its global lock' if has_no_lock else ''}"
    fact = "the writes of a forward cannot be watched: the layout of this Python's frames is unknown"
    raise TraceError(shown, fact, "run it with CPython 3.11, 3.12 or 3.13")


def _own_frame(first: Any, second: Any, third: Any) -> types.FrameType:
    return sys._getframe()


def _count_locals(code: types.CodeType) -> int:
    """Count the slots before the stack: local variables, cells, and free variables."""
    return len({*code.co_varnames, *code.co_cellvars}) + len(code.co_freevars)


def _word(address: int) -> int:
    return POINTER.from_address(address).value or 0
