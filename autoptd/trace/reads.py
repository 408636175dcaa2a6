"""Snapshot the Python state that a traced forward can read, and report changes since compilation.

In: the code that ran in the trace (`Reads`), the model and its loss function. Out: attributes of modules and objects,
items, globals, cells, class attributes, patched functions, settings of the process and environment variables whose
value has changed since. An attribute that is not named in that code is ignored: a counter that only the training loop
reads has no effect.

    snapshot = Snapshot(model, loss_fn, captured.reads)
    model.alpha = 2.0
    snapshot.changes()      # [Difference(path="alpha", before=1.0, after=2.0)]

State is held as in `subject/contents.py`: a holder gives its entries by a text that names each, and restores them.
What a program can only patch (`Names`, `OfFunction`, `ClassOf`, `Setting`) is held here.
"""

from __future__ import annotations

import builtins
import gc
import os
import sys
import types
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import _lru_cache_wrapper, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from autoptd.compat import FakeTensor
from autoptd.ir.buffers import bytes_of
from autoptd.subject.contents import (
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
    base_of,
    has_entries,
    is_opaque,
)
from autoptd.subject.storage import OWN
from autoptd.trace.changes import differing, held_in, text_of
from autoptd.trace.loss import LossAndOutputs
from autoptd.trace.users import is_users_module, may_read

Scope = tuple[types.CodeType, dict[str, Any]]
# The attributes of nn.Module that determine what runs.
DICTS = ("_modules", "_parameters", "_buffers", "_forward_pre_hooks", "_forward_hooks")
DICTS += ("_backward_pre_hooks", "_backward_hooks")
# Objects of these libraries hold no state that affects a model's computation.
LIBRARIES = {"autoptd", "torch", "numpy", "logging", "threading", "_thread", "weakref", "builtins", "re"}
# A larger state is not searched completely.
MOST_PLACES = 200_000
MOST_SHOWN = 4
WEAK = (weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet)


@dataclass(frozen=True)
class Reads:
    """Hold the code that a forward ran, with globals; the names in it; and the forward's writes, by path."""

    scopes: tuple[Scope, ...] = ()
    names: frozenset[str] = frozenset()
    written: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, entered: list[Scope], asked: set[str], written: Mapping[str, str]) -> Reads:
        """Collect the code that ran; `asked` are attribute names that were passed as strings."""
        scopes = tuple((code, names) for code, names in entered if may_read(code))
        found = {name for code, _ in scopes for name in _names_in(code)}
        return cls(scopes, frozenset(found | asked), written)


def _names_in(code: types.CodeType) -> set[str]:
    return {*code.co_names, *_texts(code.co_consts)}


def _texts(constants: tuple[Any, ...]) -> Iterator[str]:
    for value in constants:
        if isinstance(value, str):
            yield value
        elif isinstance(value, tuple):
            yield from _texts(value)


OF_FUNCTION = ("__code__", "__defaults__", "__kwdefaults__")


@dataclass(frozen=True)
class Names:
    """Hold the names of a class or module that code mentions, and the operator methods of a class."""

    holder: Any
    names: frozenset[str]

    def entries(self) -> Entries:
        return {
            f".{name}": value
            for name, value in vars(self.holder).items()
            if not isinstance(value, types.ModuleType) and (name in self.names or _is_operator(name, value))
        }

    kept = entries

    def restore(self, kept: Entries) -> None:
        now = self.entries()
        for name in now.keys() - kept.keys():
            delattr(self.holder, name[1:])
        for name, value in kept.items():
            if now.get(name, MISSING) is not value:
                setattr(self.holder, name[1:], value)


def _is_operator(name: str, value: Any) -> bool:
    is_special = name.startswith("__") and name.endswith("__")
    return is_special and isinstance(getattr(value, "__func__", value), types.FunctionType)


@dataclass(frozen=True)
class OfFunction:
    """Hold the code of a function, the defaults of its arguments, and its attributes."""

    holder: types.FunctionType

    def entries(self) -> Entries:
        own = {f".{name}": getattr(self.holder, name) for name in OF_FUNCTION}
        return own | {f".{name}": value for name, value in vars(self.holder).items()}

    kept = entries

    def restore(self, kept: Entries) -> None:
        for name in OF_FUNCTION:
            if getattr(self.holder, name) is not kept[f".{name}"]:
                setattr(self.holder, name, kept[f".{name}"])
        names = vars(self.holder)
        plain = {name[1:]: value for name, value in kept.items() if name[1:] not in OF_FUNCTION}
        if names != plain:
            names.clear()
            names.update(plain)


@dataclass(frozen=True)
class ClassOf:
    """Hold the class of an object: parametrizations change that of modules."""

    holder: Any

    def entries(self) -> Entries:
        return {".__class__": type(self.holder)}

    kept = entries

    def restore(self, kept: Entries) -> None:
        (cls,) = kept.values()
        if type(self.holder) is not cls:
            self.holder.__class__ = cls


@dataclass(frozen=True)
class Setting:
    """Hold a setting of the process, by the function that returns it."""

    holder: Callable[[], Any]
    set: Callable[[Any], Any]

    def entries(self) -> Entries:
        return {"": self.holder()}

    kept = entries

    def restore(self, kept: Entries) -> None:
        if self.holder() != kept[""]:
            self.set(kept[""])


# Every tensor factory reads the first one.
SETTINGS = (
    Setting(torch.get_default_dtype, torch.set_default_dtype),
    Setting(torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    Setting(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
)


def settings_of(names: frozenset[str]) -> list[Setting]:
    """Return the settings that code with these names reads."""
    return [one for one in SETTINGS if one is SETTINGS[0] or one.holder.__name__ in names]


Readable = Holder | Names | OfFunction | ClassOf | Setting


class Stamp(NamedTuple):
    """Identify the content of a tensor by a hash of its bytes."""

    text: str
    shape: torch.Size
    dtype: torch.dtype
    bytes: int

    @classmethod
    def of(cls, x: Tensor) -> Stamp:
        """Stamp a tensor; parameters are tracked elsewhere, and tensors without data cannot be stamped."""
        if isinstance(x, nn.Parameter):
            return cls(_text_of_parameter(x), torch.Size(), torch.float32, 0)
        if isinstance(x, FakeTensor) or x.is_meta or x.layout is not torch.strided:
            return cls("a tensor", torch.Size(), torch.float32, 0)
        own = x.detach().cpu().contiguous()
        text = repr(own.tolist()) if own.numel() <= MOST_SHOWN else "a tensor"
        return cls(text, x.shape, x.dtype, zlib.crc32(bytes_of(own).numpy()))

    def __repr__(self) -> str:
        return self.text


def _text_of_parameter(x: Tensor) -> str:
    """Return the properties that determine how a parameter is trained."""
    kind = "a parameter" if x.requires_grad else "a frozen parameter"
    has_hooks = x._backward_hooks or getattr(x, "_post_accumulate_grad_hooks", None)
    return f"{kind} with hooks" if has_hooks else kind


class Stamps:
    """Cache the stamps of tensors; a write to a tensor invalidates its stamp."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Tensor, int, Stamp]] = {}

    def of(self, x: Tensor) -> Stamp:
        known = self._known.get(id(x))
        # The stamp of a parameter does not depend on its version counter.
        version = -1 if x.is_inference() or isinstance(x, nn.Parameter) else x._version
        if known is None or known[0] is not x or known[1] != version or version < 0:
            stamp = Stamp.of(x)
            # Keep the old object while the content is the same.
            stamp = known[2] if known is not None and known[2] == stamp else stamp
            known = self._known[id(x)] = (x, version, stamp)
        return known[2]


@dataclass(frozen=True, slots=True)
class Place:
    """Hold a place that a forward may read, and its former entries: raw, and with stamps for tensors."""

    path: str
    holder: Readable
    held: Entries
    before: Entries
    kept: Any
    has_tensors: bool


class Difference(NamedTuple):
    """Describe a value that has changed since the model was compiled."""

    path: str
    before: Any
    after: Any
    place: Place
    is_replaced: bool = True

    @property
    def is_tensor(self) -> bool:
        """Tell whether the new value is a tensor; the old one may not be."""
        return isinstance(self.after, Stamp) and isinstance(self.before, (Stamp, type(None), type(MISSING)))

    @property
    def is_number(self) -> bool:
        """Tell whether the value is a number: its effect on the forward may be small now and large later."""
        return any(isinstance(x, (int, float)) and not isinstance(x, bool) for x in (self.before, self.after))

    @property
    def texts(self) -> tuple[str, str]:
        """Return both values as text for messages."""
        return text_of(self.before), text_of(self.after)


class Snapshot:
    """Snapshot the state that a model's forward can read; see the module."""

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Any] | None, reads: Reads) -> None:
        self._names, self._stamps = reads.names, Stamps()
        self._codes = {code for code, _ in reads.scopes}
        # By id; keeping the objects alive keeps their ids unique.
        self._seen: dict[int, Any] = {}
        self._classes: dict[int, type] = {}
        self._places: list[Place] = []
        self._waiting: list[tuple[str, Any]] = [("", model)]
        if isinstance(loss_fn, LossAndOutputs):
            self._waiting += [("loss_fn", loss_fn.loss_fn), ("outputs", loss_fn.outputs)]
        else:
            self._waiting.append(("loss_fn", loss_fn))
        if {"environ", "getenv"} & reads.names:
            self._waiting.append(("os.environ", vars(os.environ)["_data"]))
        for setting in settings_of(reads.names):
            self._take(f"torch.{setting.holder.__name__}()", setting)
        self._take("torch.Tensor", Names(Tensor, reads.names))
        for code, names in reads.scopes:
            home = str(names.get("__name__", "")).split(".")[0]
            named = set() if home in LIBRARIES and home != "torch" else _names_in(code)
            # A global may shadow a builtin.
            for name in named & (names.keys() | vars(builtins).keys()):
                self._take_name(str(names.get("__name__", "")), names, name)
        # Modules that are imported locally, or looked up by name.
        self._waiting += [(name, sys.modules[name]) for name in reads.names & sys.modules.keys()]
        while self._waiting and len(self._places) < MOST_PLACES:
            self._visit(*self._waiting.pop())

    def changes(self) -> list[Difference]:
        """Return the differences from the snapshot."""
        found = []
        for place in self._places:
            now = place.holder.entries()
            if not place.has_tensors and _is_identical(place.held, now):
                continue
            for entry, before, after in differing(place.before, self._stamped(place.holder, now)):
                path = f"{place.path}{entry}".removeprefix(".")
                is_replaced = place.held.get(entry) is not now.get(entry)
                found.append(Difference(path, before, after, place, is_replaced))
        return found

    def _stamped(self, holder: Readable, found: Entries) -> Entries:
        """Return the entries that a forward may read, with stamps instead of tensors."""
        if isinstance(holder, OfModule) and "_modules" in holder.holder:
            found = {name: x for name, x in found.items() if name[1:] in self._names and name[1:] not in OWN}
        return {name: self._stamps.of(x) if isinstance(x, Tensor) else x for name, x in found.items()}

    def _take(self, path: str, holder: Readable, *, is_leaf: bool = False) -> None:
        held = holder.entries()
        before = self._stamped(holder, held)
        has_tensors = any(isinstance(x, Tensor) for x in held.values())
        self._places.append(Place(path, holder, held, before, holder.kept(), has_tensors))
        if not is_leaf and not is_opaque(holder.holder):
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
        if type(value) in weakref.ProxyTypes:
            # It has the class of its object; an object that is gone has no methods.
            with suppress(ReferenceError):
                self._waiting.append((path, value.__init__.__self__))
        elif isinstance(value, nn.Module):
            self._take(path, OfModule(vars(value), weakref.ref(value)))
            self._take(path, ClassOf(value), is_leaf=True)
            for kind in DICTS:
                home = path if kind in DICTS[:3] else f"{path}.{kind}"
                if kind in vars(value):
                    self._take(home, OfModule(vars(value)[kind], weakref.ref(value)))
            self._visit_class(type(value))
        elif isinstance(value, type):
            self._visit_class(value)
        elif isinstance(value, types.ModuleType):
            self._visit_module(value)
        elif isinstance(value, types.FunctionType):
            self._visit_function(value)
        elif isinstance(value, _lru_cache_wrapper):
            self._waiting += [(f"{path}()", held) for held in held_in(value)]
            self._waiting.append((path, value.__wrapped__))
        elif isinstance(value, (tuple, list, dict)) or has_entries(value):
            self._visit_object(path, value)
        elif isinstance(value, (types.MethodType, staticmethod, classmethod)):
            self._waiting += [(path, value.__func__), (path, getattr(value, "__self__", None))]
        elif isinstance(value, property):
            self._waiting.append((path, value.fget))
        elif isinstance(value, types.MappingProxyType):
            self._waiting += [(path, held) for held in gc.get_referents(value)]
        elif isinstance(value, weakref.ref):
            self._waiting.append((path, value()))
        elif is_opaque(base_of(value)):
            self._take(path, Content(base_of(value)))

    def _visit_module(self, module: types.ModuleType) -> None:
        found = self._names & vars(module).keys()
        if is_users_module(module):
            for name in found:
                self._take_name(module.__name__, module, name)
        else:
            # Functions that a program may patch; their internal state is ignored.
            self._take(module.__name__, Names(module, self._names), is_leaf=True)
            inner = [(name, vars(module)[name]) for name in found]
            self._waiting += [pair for pair in inner if isinstance(pair[1], types.ModuleType)]

    def _visit_object(self, path: str, value: Any) -> None:
        if isinstance(value, partial):
            self._waiting += [(path, value.func), (f"{path}.args", value.args), (path, value.keywords)]
        elif isinstance(value, tuple):
            self._waiting += [(f"{path}[{i}]", item) for i, item in enumerate(value)]
        elif isinstance(value, CONTAINERS):
            self._take(path, Content(value))
        elif isinstance(value, WEAK):
            self._waiting.append((path, value.data))  # type: ignore[union-attr]
        elif str(type(value).__module__).split(".")[0] not in LIBRARIES:
            self._take(path, Attributes(value))
            self._take(path, ClassOf(value), is_leaf=True)
            self._visit_class(type(value))

    def _visit_class(self, cls: type) -> None:
        for base in cls.__mro__:
            is_library = base.__module__.split(".")[0] in LIBRARIES and not issubclass(base, nn.Module)
            if is_library or id(base) in self._classes:
                continue
            self._classes[id(base)] = base
            self._take(base.__qualname__, Names(base, self._names))

    def _visit_function(self, function: types.FunctionType) -> None:
        inner = getattr(function, "__wrapped__", None)
        if function.__code__ in self._codes:
            path, names = function.__qualname__, function.__code__.co_freevars
            for name, cell in zip(names, function.__closure__ or (), strict=True):
                self._take(f"{path}.{name}", Cell(cell, name))
            self._take(path, OfFunction(function))
        elif self._names & vars(function).keys():
            self._take(function.__qualname__, Names(function, self._names))
        self._waiting.append((function.__qualname__, inner))


def _is_identical(one: Entries, other: Entries) -> bool:
    return list(one) == list(other) and all(one[name] is other[name] for name in one)
