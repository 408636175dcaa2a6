"""What a traced forward can read of Python's state, and what of it is not as it was when the model was compiled.

In: the code that ran in the trace (`Reads`), the model and its loss function. Out: attributes of modules and objects, items,
globals, cells, class attributes and environment variables whose value has changed since. An attribute that no code
which ran has named is not looked at: a counter that only the loop reads changes nothing.

    snapshot = Snapshot(model, loss_fn, captured.reads)
    model.alpha = 2.0
    snapshot.changes()      # [Difference(path="alpha", before=1.0, after=2.0)]
"""

from __future__ import annotations

import os
import types
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from autoptd.compat import FakeTensor
from autoptd.trace.attributes import OWN
from autoptd.trace.contents import (
    CONTAINERS,
    MISSING,
    PLAIN,
    Attributes,
    Cell,
    Content,
    Entries,
    Holder,
    Name,
    OfModule,
    has_entries,
    is_opaque,
)
from autoptd.trace.sameness import differing, text_of
from autoptd.trace.users import is_users_module, may_read

Scope = tuple[types.CodeType, dict[str, Any]]
# Of nn.Module's own attributes those that decide what runs.
DICTS = ("_modules", "_parameters", "_buffers", "_forward_pre_hooks", "_forward_hooks")
# Objects of these count with nothing that a model computes with.
LIBRARIES = {"torch", "numpy", "logging", "threading", "_thread", "weakref", "builtins", "re"}
# A larger state is not looked through to its end.
MOST_PLACES = 200_000
MOST_SHOWN = 4


@dataclass(frozen=True)
class Reads:
    """The code that a forward ran, each with its globals; the names in it; and what the forward writes to itself, by path."""

    scopes: tuple[Scope, ...] = ()
    names: frozenset[str] = frozenset()
    written: frozenset[str] = frozenset()

    @classmethod
    def of(cls, entered: list[Scope], asked: set[str], written: set[str]) -> Reads:
        """Gather what ran; `asked` are names of attributes that were asked for as text."""
        scopes = tuple((code, names) for code, names in entered if may_read(code))
        found = {name for code, _ in scopes for name in (*code.co_names, *_texts(code.co_consts))}
        return cls(scopes, frozenset(found | asked), frozenset(written))


def _texts(constants: tuple[Any, ...]) -> Iterator[str]:
    for value in constants:
        if isinstance(value, str):
            yield value
        elif isinstance(value, tuple):
            yield from _texts(value)


class Stamp(NamedTuple):
    """What a tensor holds, told apart by a sum of its bytes."""

    text: str
    shape: torch.Size
    dtype: torch.dtype
    bytes: int

    @classmethod
    def of(cls, x: Tensor) -> Stamp:
        """Stamp a tensor; parameters are followed elsewhere, and of one without data nothing is known."""
        if isinstance(x, (nn.Parameter, FakeTensor)) or x.is_meta or x.layout is not torch.strided:
            return cls("a tensor", torch.Size(), torch.float32, 0)
        own = x.detach().cpu().contiguous()
        text = repr(own.tolist()) if own.numel() <= MOST_SHOWN else "a tensor"
        return cls(text, x.shape, x.dtype, zlib.crc32(own.reshape(-1).view(torch.uint8).numpy()))

    def __repr__(self) -> str:
        return self.text


class Stamps:
    """The stamps of tensors, each made again where something has written to it."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Tensor, int, Stamp]] = {}

    def of(self, x: Tensor) -> Stamp:
        known = self._known.get(id(x))
        version = -1 if x.is_inference() else x._version
        if known is None or known[0] is not x or known[1] != version or version < 0:
            stamp = Stamp.of(x)
            # One object as long as the content is the same.
            stamp = known[2] if known is not None and known[2] == stamp else stamp
            known = self._known[id(x)] = (x, version, stamp)
        return known[2]


@dataclass(frozen=True, slots=True)
class Place:
    """Something that a forward may read from, and what it held: the values themselves, and with stamps of tensors."""

    path: str
    holder: Holder
    held: Entries
    before: Entries
    kept: Any


class Difference(NamedTuple):
    """A value that was another one when the model was compiled."""

    path: str
    before: Any
    after: Any
    place: Place
    is_replaced: bool = True

    @property
    def is_tensor(self) -> bool:
        """Tell whether a tensor is there now; before it, there may have been none."""
        return isinstance(self.after, Stamp) and isinstance(self.before, (Stamp, type(None), type(MISSING)))

    @property
    def is_number(self) -> bool:
        """Tell whether it is of a number, of which a forward may make little now and much later."""
        return any(isinstance(x, (int, float)) and not isinstance(x, bool) for x in (self.before, self.after))

    @property
    def texts(self) -> tuple[str, str]:
        """Both values, for messages."""
        return text_of(self.before), text_of(self.after)


class Snapshot:
    """The state of a model that its forward can read; see the module."""

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Any] | None, reads: Reads) -> None:
        self._names, self._stamps = reads.names, Stamps()
        self._codes = {code for code, _ in reads.scopes}
        # By their identity: alive, so that no other object gets it.
        self._seen: dict[int, Any] = {}
        self._classes: dict[int, type] = {}
        self._places: list[Place] = []
        self._waiting: list[tuple[str, Any]] = [("", model), ("loss_fn", loss_fn)]
        if {"environ", "getenv"} & reads.names:
            self._waiting.append(("os.environ", vars(os.environ)["_data"]))
        for code, names in reads.scopes:
            for name in names.keys() & set(code.co_names):
                self._take_name(str(names.get("__name__", "")), names, name)
        while self._waiting and len(self._places) < MOST_PLACES:
            self._visit(*self._waiting.pop())

    def changes(self) -> list[Difference]:
        """Return what is different now."""
        found = []
        for place in self._places:
            now = place.holder.entries()
            for entry, before, after in differing(place.before, self._stamped(place.holder, now)):
                path = f"{place.path}{entry}".removeprefix(".")
                is_replaced = place.held.get(entry) is not now.get(entry)
                found.append(Difference(path, before, after, place, is_replaced))
        return found

    def _stamped(self, holder: Holder, found: Entries) -> Entries:
        """Return the entries that a forward may read, stamps in the place of tensors."""
        if isinstance(holder, OfModule) and "_modules" in holder.holder:
            found = {name: x for name, x in found.items() if name[1:] in self._names and name[1:] not in OWN}
        return {name: self._stamps.of(x) if isinstance(x, Tensor) else x for name, x in found.items()}

    def _take(self, path: str, holder: Holder) -> None:
        held = holder.entries()
        before = self._stamped(holder, held)
        self._places.append(Place(path, holder, held, before, holder.kept()))
        if not is_opaque(holder.holder):
            self._waiting += [(f"{path}{entry}", value) for entry, value in before.items()]

    def _take_name(self, home: str, owner: Any, name: str) -> None:
        key = hash((id(owner), name))
        if key not in self._seen:
            self._seen[key] = owner
            self._take(home, Name(owner, name))

    def _visit(self, path: str, value: Any) -> None:
        if isinstance(value, (Stamp, *PLAIN)) or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, nn.Module):
            self._take(path, OfModule(vars(value), weakref.ref(value)))
            for kind in DICTS:
                home = path if kind in DICTS[:3] else f"{path}.{kind}"
                if kind in vars(value):
                    self._take(home, OfModule(vars(value)[kind], weakref.ref(value)))
            self._visit_class(type(value))
        elif isinstance(value, type):
            self._visit_class(value)
        elif isinstance(value, types.ModuleType):
            if is_users_module(value):
                for name in self._names & vars(value).keys():
                    self._take_name(value.__name__, value, name)
        elif isinstance(value, types.FunctionType):
            self._visit_function(value)
        elif isinstance(value, (tuple, list, dict)) or has_entries(value):
            self._visit_object(path, value)
        elif isinstance(value, (types.MethodType, staticmethod, classmethod)):
            self._waiting += [(path, value.__func__), (path, getattr(value, "__self__", None))]
        elif isinstance(value, property):
            self._waiting.append((path, value.fget))
        elif is_opaque(value):
            self._take(path, Content(value))

    def _visit_object(self, path: str, value: Any) -> None:
        if isinstance(value, partial):
            self._waiting += [(path, value.func), (f"{path}.args", value.args), (path, value.keywords)]
        elif isinstance(value, tuple):
            self._waiting += [(f"{path}[{i}]", item) for i, item in enumerate(value)]
        elif isinstance(value, CONTAINERS):
            self._take(path, Content(value))
        elif str(type(value).__module__).split(".")[0] not in LIBRARIES:
            self._take(path, Attributes(value))
            self._visit_class(type(value))

    def _visit_class(self, cls: type) -> None:
        for base in cls.__mro__:
            is_library = base.__module__.split(".")[0] in LIBRARIES and not issubclass(base, nn.Module)
            if is_library or id(base) in self._classes:
                continue
            self._classes[id(base)] = base
            for name, value in vars(base).items():
                # Operators are called without their names.
                code = getattr(getattr(value, "__func__", value), "__code__", None)
                if name in self._names or code in self._codes:
                    self._take_name(base.__qualname__, base, name)

    def _visit_function(self, function: types.FunctionType) -> None:
        inner = getattr(function, "__wrapped__", None)
        if function.__code__ in self._codes:
            path, names = function.__qualname__, function.__code__.co_freevars
            for name, cell in zip(names, function.__closure__ or (), strict=True):
                self._take(f"{path}.{name}", Cell(cell, name))
            defaults: Mapping[str, Any] = function.__kwdefaults__ or {}
            self._waiting += [(path, function.__defaults__), (path, defaults)]
        self._waiting.append((function.__qualname__, inner))


__all__ = ["Difference", "Place", "Reads", "Snapshot", "Stamp"]
