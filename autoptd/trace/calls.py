"""Determine which of its arguments a function may change, for functions written in C.

In: a function and its arguments. Out: the objects that it may write to or consume, and in which way. Python
functions are watched as they run, except torch's and the standard library's: for those the containers among
the arguments count.

    handed_to([].append, [1])      # the list: its content may change
    handed_to(next, [numbers])     # the iterator: it is taken from
"""

from __future__ import annotations

import builtins
import io
import itertools
import operator
import os
import sys
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import _lru_cache_wrapper, partial
from typing import Any

from torch import Generator, Tensor, nn

from autoptd.subject.contents import CONTAINERS, PLAIN, base_of, is_opaque
from autoptd.trace.instructions import NULL, at
from autoptd.trace.users import is_users

BUILT_IN = (types.BuiltinFunctionType, types.MethodWrapperType)
DESCRIPTORS = (types.MethodDescriptorType, types.WrapperDescriptorType, types.ClassMethodDescriptorType)
# Built-in functions and methods that only read their arguments.
LOOKS = set(
    "len isinstance issubclass getattr hasattr id type repr str callable hash iter dir format".split()
)
LOOKS |= {"length_hint", "getrefcount", "is_tracked"}
READS = set(
    "get items keys values copy index count qsize empty full getvalue tell fileno tolist item astype".split()
)
READS |= set("readable writable seekable isatty __getitem__ __contains__ __len__ __length_hint__".split())
READS |= set("__repr__ __str__ __eq__ __hash__ __iter__".split())
# Those of LOOKS that return an attribute, which may be a dict.
ASKING = {"getattr", "hasattr"}
# The classes that define the methods of tensors.
TENSORS = tuple(kind for kind in Tensor.__mro__ if kind is not object)
SETS = {"setattr", "delattr", "__setattr__", "__delattr__"}
# Methods of a descriptor, such as a slot's, that write to their first argument.
SETS_OF_SLOTS = {"__set__", "__delete__"}
# Functions of `torch.random` that change later draws.
SEEDS = {"manual_seed", "manual_seed_all", "seed", "seed_all", "set_state", "set_rng_state"}
# Modules whose objects hold no state that affects a model's computation.
HARMLESS = set(
    "torch re _sre _thread builtins functools types weakref _weakref datetime decimal fractions".split()
)
HARMLESS |= set(
    "numpy operator _operator _abc typing _struct enum string threading contextlib inspect".split()
)
HARMLESS |= {"logging", "warnings", "time"}
# Functions with effects outside of Python objects.
FILES = set("remove rename replace unlink mkdir rmdir truncate write putenv unsetenv setenv".split())
MOST_PARTIALS = 8


class Kind(Enum):
    """Name the ways in which an argument may change."""

    CONTENT, ATTRIBUTE, MOVED, CACHE = auto(), auto(), auto(), auto()


@dataclass(frozen=True, slots=True)
class Handed:
    """Pair an object with how it may change: `how` is the name of an attribute, or a description."""

    kind: Kind
    value: Any
    how: str = ""


def operands(name: str, arg: int, top: int) -> tuple[Any, list[Any]]:
    """Return the function and the arguments that an instruction is about to call with."""
    if name == "CALL_FUNCTION_EX":
        has_keywords = bool(arg & 1)
        keywords = at(top, 0) if has_keywords else {}
        given, place = at(top, int(has_keywords)), int(has_keywords) + 1
        # From Python 3.13 on there is an unused slot for self before the arguments.
        function = at(top, place)
        function = at(top, place + 1) if function is NULL else function
        values = list(dict.values(keywords)) if isinstance(keywords, dict) else []
        return function, [*(given if isinstance(given, (tuple, list)) else [given]), *values]
    first = 1 if name == "CALL_KW" else 0
    args = [at(top, first + place) for place in reversed(range(arg))]
    function, method = at(top, first + arg), at(top, first + arg + 1)
    # A method and its self, or nothing and a function.
    if method is NULL:
        return function, args
    # From Python 3.13 on self comes second, and may be missing.
    return (method, args) if function is NULL else (method, [function, *args])


def called(arg: int, top: int) -> Any:
    """Return only the function that `CALL` is about to call with `arg` arguments."""
    function = at(top, arg + 1)
    return at(top, arg) if function is NULL else function


class Harmless:
    """Remember functions for which `handed_to` yields nothing, whatever the arguments: most calls."""

    def __init__(self) -> None:
        # By id, kept alive: code objects of Python functions, and permanent functions and methods of C.
        self._known: dict[int, Any] = {}

    def __contains__(self, function: Any) -> bool:
        kind = type(function)
        if kind is types.MethodType:
            function = function.__func__
            kind = type(function)
        known = function.__code__ if kind is types.FunctionType else function
        if id(known) in self._known:
            return True
        if kind is types.FunctionType:
            is_harmless = is_users(known)
        elif kind is types.MethodDescriptorType:
            is_harmless = function.__objclass__ in TENSORS or (
                function.__objclass__ is dict and function.__name__ in READS
            )
        elif kind is types.BuiltinFunctionType:
            is_harmless = function.__self__ is builtins and function.__name__ in LOOKS - ASKING
        else:
            # Short-lived objects: their ids are reused.
            return _is_called_in_python(function)
        if is_harmless:
            self._known[id(known)] = known
        return is_harmless


def _is_called_in_python(function: Any) -> bool:
    if function is super:
        return True
    if type(function) is types.MethodWrapperType:
        return function.__name__ == "__getattribute__"  # type: ignore[no-any-return]
    return isinstance(function, nn.Module) and is_python(function, "__call__")


def handed_to(function: Any, args: Sequence[Any]) -> Iterator[Handed]:
    """Yield the arguments that a call may change."""
    for _ in range(MOST_PARTIALS):
        if not isinstance(function, partial):
            break
        function, args = function.func, [*function.args, *args, *function.keywords.values()]
    if isinstance(function, types.MethodType):
        function, args = function.__func__, [function.__self__, *args]
    if isinstance(function, types.FunctionType):
        if function.__module__ in ("torch.random", "torch.cuda.random") and function.__name__ in SEEDS:
            yield Handed(Kind.MOVED, function, "is called")
        elif not is_users(function.__code__):
            for arg in args:
                if isinstance(arg, CONTAINERS) or is_opaque(arg):
                    yield Handed(Kind.CONTENT, arg)
    elif isinstance(function, _lru_cache_wrapper):
        if _is_own(function.__wrapped__):
            yield Handed(Kind.CACHE, function)
    elif isinstance(function, BUILT_IN):
        owner = function.__self__
        if owner is None or isinstance(owner, types.ModuleType):
            yield from _handed_to_function(function, args)
        elif isinstance(owner, type):
            yield from _handed_over(args)
        else:
            yield from _handed_to_method(function.__name__, owner, args)
    elif isinstance(function, DESCRIPTORS):
        if args and (not isinstance(args[0], type) or function.__name__ in SETS):
            yield from _handed_to_method(function.__name__, args[0], args[1:])
    elif isinstance(function, type) or not is_python(function, "__call__"):
        # A class implemented in C, such as list or zip, or a callable C object.
        yield from _handed_over(args)


def _handed_to_function(function: Any, args: Sequence[Any]) -> Iterator[Handed]:
    name, home = function.__name__, str(function.__module__ or "").split(".")[0]
    is_of_dict = name == "vars" or (name == "getattr" and args[1:2] == ["__dict__"])
    if is_of_dict and args:
        yield Handed(Kind.ATTRIBUTE, args[0], "__dict__")
    elif home == "torch" or name in LOOKS:
        return
    elif name in SETS and args:
        yield Handed(Kind.ATTRIBUTE, args[0], str(args[1]))
    elif name == "open" or home in ("posix", "nt"):
        if _writes_a_file(name, args):
            yield Handed(Kind.MOVED, function, "writes to a file or to the process's environment")
    elif name == "print":
        # print only reads the values that it prints.
        for file in args:
            if isinstance(file, io.IOBase) and not is_python(file, "write"):
                yield from _handed_to_method("write", file, ())
    elif home == "_thread" and name.startswith("start_"):
        yield Handed(Kind.MOVED, function, "starts a thread")
    else:
        yield from _handed_over(args)


def _handed_to_method(name: str, owner: Any, args: Sequence[Any]) -> Iterator[Handed]:
    owner = base_of(owner)
    if name in SETS and args:
        yield Handed(Kind.ATTRIBUTE, owner, str(args[0]))
    elif name in SETS_OF_SLOTS and args:
        yield Handed(Kind.ATTRIBUTE, args[0], getattr(owner, "__name__", ""))
    elif isinstance(owner, (Tensor, types.ModuleType, types.FunctionType, *PLAIN)) or _is_terminal(owner):
        return
    elif isinstance(owner, _lru_cache_wrapper):
        if name == "cache_info":
            yield Handed(Kind.MOVED, owner, "has its cache_info() read")
    elif isinstance(owner, Generator):
        if name in SEEDS:
            yield Handed(Kind.MOVED, owner, "is seeded")
    elif isinstance(owner, CONTAINERS) or is_opaque(owner):
        if name not in READS:
            yield Handed(Kind.CONTENT, owner)
    elif is_iterator(owner) and not isinstance(owner, io.IOBase):
        if name not in READS:
            yield Handed(Kind.MOVED, owner, "is taken from")
    elif name not in READS and not _is_harmless(name, owner):
        yield Handed(Kind.MOVED, owner, f"has its method {name} called")
    yield from _handed_over(args)


def _handed_over(args: Sequence[Any]) -> Iterator[Handed]:
    for arg in args:
        if isinstance(arg, CONTAINERS) or is_opaque(arg):
            yield Handed(Kind.CONTENT, arg)
        elif is_iterator(arg):
            yield Handed(Kind.MOVED, arg, "is taken from")
        # A function that receives it may call it, as map does.
        elif isinstance(arg, (*BUILT_IN, partial, _lru_cache_wrapper)):
            yield from handed_to(arg, ())


def is_iterator(value: Any) -> bool:
    """Tell whether reading a value's items changes it, in C code that cannot be watched."""
    kind = type(value)
    if not hasattr(kind, "__next__") or is_python(value, "__next__"):
        return False
    # An endless repeat always yields the same value.
    return kind is not itertools.repeat or operator.length_hint(value, -1) >= 0


def is_python(value: Any, method: str) -> bool:
    """Tell whether a method of a value is written in Python."""
    return isinstance(getattr(type(value), method, None), types.FunctionType)


def _is_terminal(owner: Any) -> bool:
    """Tell whether an object only displays the text that is written to it."""
    return any(owner is stream for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__))


def _is_harmless(name: str, owner: Any) -> bool:
    if isinstance(owner, nn.Module):
        return True
    # Methods of every object: __init__, __getattribute__, comparison.
    if hasattr(object, name) or type(owner).__module__.split(".")[0] in HARMLESS:
        return True
    return isinstance(owner, BaseException)


def _writes_a_file(name: str, args: Sequence[Any]) -> bool:
    if name != "open":
        return name in FILES
    modes = [arg for arg in args[1:] if isinstance(arg, str)]
    flags = [arg for arg in args[1:2] if isinstance(arg, int) and not isinstance(arg, bool)]
    is_to_null = bool(args) and args[0] == os.devnull
    return not is_to_null and (
        any(set(mode) & set("wax+") for mode in modes[:1]) or any(flag & 3 for flag in flags)
    )


def _is_own(function: Any) -> bool:
    """Tell whether a function is the user's code: installed packages are trusted to keep no state."""
    if not isinstance(function, types.FunctionType) or "site-packages" in function.__code__.co_filename:
        return False
    return (function.__module__ or "").split(".")[0] not in sys.stdlib_module_names
