"""What Python keeps between calls of a model: a traced graph has none of it, so a forward must not change it.

In: a model (and its loss function). Looked at are plain values (numbers, strings, containers of them, objects
that hold them) in the attributes of all modules, of their classes, in globals beside them and in what the
loss function closes over, and the states of Python's and numpy's random numbers. `of_call` also follows the
user's own code: the globals that its functions name, their defaults, attributes and `functools.lru_cache`.
Out: what a call has changed, and the model as it was before.

    before = State.of_call(model)
    model(x)
    before.changes(State.of_call(model))      # [Change("layers.0.calls", "0", "1")]
    before.restore()                  # a trace leaves no fake tensor behind
"""

from __future__ import annotations

import itertools
import random
import sys
import types
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from functools import _lru_cache_wrapper, partial
from typing import Any

import torch
from torch import Tensor, nn

from autoptd.compat import FakeTensor
from autoptd.errors import TraceError

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
CONTAINERS = (dict, list, tuple, set, frozenset, deque)
OPAQUE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType)
# Of nn.Module itself: hooks and names, no state.
OWN = {key for key in vars(nn.Module()) if key.startswith("_")}
# Of these the dicts of hooks, by their numbers.
HOOKS = sorted(key for key in OWN if "hooks" in key and isinstance(vars(nn.Module())[key], dict))
# Entries of a container that are looked at.
MAX_ITEMS = 4096
# Objects in objects.
DEEPEST = 5
MISSING = "missing"
TENSOR = "a tensor"
RANDOM = {"random": "Python's random module", "numpy.random": "numpy's random numbers"}


@dataclass(frozen=True)
class Change:
    """A value that was different after a call, by its path (`layers.0.calls`)."""

    path: str
    before: str
    after: str

    def refuse(self) -> TraceError:
        """Make the error that names it."""
        if self.path in RANDOM:
            fact = f"the forward draws from {RANDOM[self.path]} (LayerDrop does): the traced graph would repeat one outcome"
            return TraceError(
                "model", fact, "switch it off (layerdrop=0), or draw outside and pass the numbers as an input"
            )
        values = (
            "" if " 0x" in self.before + self.after else f" ({self.before} before it, {self.after} after it)"
        )
        fact = f"is changed by the forward{values}, which the traced graph would not do"
        remedy = "keep no Python state in forward: count in the training loop, and pass what the model needs as an input"
        return TraceError(self.path, fact, remedy)


class State:
    """All values that Python keeps for a model, as they are now.

    `leaves` are texts by path, equal as long as the value is; `tensors` are by path as well; `holders` are
    pairs of what can be written to and its content; `cached` are functions with `functools.lru_cache`.
    """

    @classmethod
    def of_call(cls, model: nn.Module, loss_fn: Any = None) -> State:
        """Return all that a call may write to: what the model holds, and what the user's functions name."""
        return cls(model, loss_fn, follows_code=True)

    def __init__(self, model: nn.Module, loss_fn: Any = None, *, follows_code: bool = False) -> None:
        self._follows_code = follows_code
        self.leaves: dict[str, str] = {}
        self.tensors: dict[str, Tensor] = {}
        # (what holds it, its name there, its path, the buffer)
        self.buffers: list[tuple[dict[str, Any], str, str, Tensor]] = []
        self.holders: list[tuple[Any, Any]] = []
        self.cached: list[Any] = []
        # Alive, so that no other object gets its id.
        self._kept: list[Any] = []
        self._seen: set[int] = set()
        modules = dict(model.named_modules())
        if isinstance(loss_fn, nn.Module):
            modules |= dict(loss_fn.named_modules(prefix="loss_fn"))
        for path, module in modules.items():
            self._visit_module(path, module)
        classes = dict.fromkeys(type(module) for module in modules.values())
        for cls in dict.fromkeys(
            base for kind in classes for base in kind.__mro__ if _is_users(base.__module__)
        ):
            self._visit_class(cls)
        for name in dict.fromkeys(cls.__module__ for cls in classes if _is_users(cls.__module__)):
            if name in sys.modules:
                self._visit_globals(name, vars(sys.modules[name]))
        if loss_fn is not None:
            self._visit("loss_fn", loss_fn, 0)
        # A forward that draws from these would repeat one outcome for ever, once it is a graph.
        self.leaves["random"] = str(hash(random.getstate()))
        if "numpy" in sys.modules:
            drawn = sys.modules["numpy"].random.get_state()
            self.leaves["numpy.random"] = str(hash((drawn[1].tobytes(), *drawn[2:])))

    def changes(self, after: State) -> list[Change]:
        """Return what is different in `after`; tensors count as equal: whoever reads them compares these."""
        paths = dict.fromkeys([*self.leaves, *after.leaves])
        pairs = [(path, self.leaves.get(path, MISSING), after.leaves.get(path, MISSING)) for path in paths]
        return [Change(*pair) for pair in pairs if pair[1] != pair[2]]

    def clear_caches(self) -> None:
        """Let every function with `functools.lru_cache` begin anew: what it kept cannot be taken out and put
        back.
        """
        for function in self.cached:
            function.cache_clear()

    def take_assigned(self) -> dict[str, Tensor]:
        """Put back buffers that were replaced by others of their shape; return these by path: they are updates.

        A trace gets an operator that writes the new values to the buffer.
        """
        assigned: dict[str, Tensor] = {}
        for holder, name, path, buffer in self.buffers:
            new = holder.get(name, buffer)
            if new is buffer or new is None or (new.shape, new.dtype) != (buffer.shape, buffer.dtype):
                continue
            holder[name] = buffer
            # Elsewhere backward may need what the buffer was.
            if isinstance(buffer, FakeTensor):
                buffer.copy_(new.detach())
            assigned[path] = new.detach()
        return assigned

    def restore(self) -> None:
        """Give every attribute and container the content that it had."""
        self.clear_caches()
        for holder, content in self.holders:
            if isinstance(holder, types.CellType):
                holder.cell_contents = content
            # Attributes of a class can be set, its `__dict__` cannot.
            elif isinstance(holder, type):
                now = _plain_names(holder)
                for key in now.keys() - content.keys():
                    delattr(holder, key)
                for key, value in content.items():
                    if now.get(key, now) is not value:
                        setattr(holder, key, value)
            elif isinstance(holder, Globals):
                holder.restore()
            elif isinstance(holder, dict):
                if list(holder) != list(content) or any(
                    holder[key] is not value for key, value in content.items()
                ):
                    holder.clear()
                    holder.update(content)
            elif isinstance(holder, list):
                holder[:] = content
            else:
                holder.clear()
                holder.update(content) if isinstance(holder, set) else holder.extend(content)

    def _visit_module(self, path: str, module: nn.Module) -> None:
        attributes = vars(module)
        self.holders.append((attributes, dict(attributes)))
        for kind in ("_parameters", "_buffers"):
            self.holders.append((attributes[kind], dict(attributes[kind])))
            for name, attribute in attributes[kind].items():
                self._keep(_join(path, name), attribute)
                if kind == "_buffers" and isinstance(attribute, Tensor):
                    self.buffers.append((attributes[kind], name, _join(path, name), attribute))
        for kind in HOOKS:
            # A hook that the forward registers would be there twice at its next call.
            self.holders.append((attributes[kind], attributes[kind].copy()))
            self.leaves[_join(path, kind)] = f"{len(attributes[kind])} of them"
        for kind in ("_forward_hooks", "_forward_pre_hooks"):
            for number, hook in attributes[kind].items():
                self._visit(_join(path, f"{kind}[{number}]"), hook, 0)
        for name, value in attributes.items():
            if name not in OWN:
                self._visit(_join(path, name), value, 0)

    def _visit_class(self, cls: type) -> None:
        names = _plain_names(cls)
        self.holders.append((cls, names))
        for name, value in names.items():
            self._visit(f"{cls.__qualname__}.{name}", value, DEEPEST - 1)
        for name, value in vars(cls).items():
            function = _function_of(value)
            is_followed = isinstance(function, types.FunctionType) and (
                function.__closure__ or self._follows_code
            )
            if is_followed or isinstance(function, _lru_cache_wrapper):
                self._visit(f"{cls.__qualname__}.{name}", function, 0)

    def _visit_globals(self, module: str, names: dict[str, Any]) -> None:
        for name, value in names.items():
            if not name.startswith("__") and isinstance(value, (bool, int, float, str)):
                self.leaves[f"{module}.{name}"] = repr(value)

    def _visit(self, path: str, value: Any, depth: int) -> None:
        if isinstance(value, Tensor):
            self.leaves[path], self.tensors[path] = TENSOR, value
        elif isinstance(value, PLAIN):
            self.leaves[path] = repr(value)
        # Modules are visited by the model's own list, under their names.
        elif id(value) in self._seen or isinstance(value, nn.Module):
            return
        elif isinstance(value, CONTAINERS):
            self._visit_container(path, value, depth)
        elif (found := _drawn(value)) is not None:
            self.leaves[path] = found
        elif isinstance(value, types.FunctionType):
            self._visit_function(path, value, depth)
        elif isinstance(value, _lru_cache_wrapper):
            self._visit_cached(path, value, depth)
        elif isinstance(value, partial):
            self._visit(path, (value.func, value.args, value.keywords), depth + 1)
        elif isinstance(value, types.MethodType):
            self._visit(path, value.__self__, depth + 1)
        elif depth < DEEPEST and not isinstance(value, OPAQUE) and (content := _attributes(value)):
            self._enter(value)
            if hasattr(value, "__dict__"):
                self.holders.append((vars(value), dict(vars(value))))
            for name, item in content.items():
                self._visit(f"{path}.{name}", item, depth + 1)
        else:
            self._keep(path, value)

    def _visit_container(self, path: str, value: Any, depth: int) -> None:
        self._enter(value)
        self.leaves[path] = f"{type(value).__name__} of {len(value)}"
        # The container itself is put back: other objects may hold it as well.
        if not isinstance(value, (tuple, frozenset)):
            self.holders.append((value, value.copy()))
        if len(value) > MAX_ITEMS or depth >= DEEPEST:
            return
        # A set has no order to number its items by.
        if isinstance(value, (set, frozenset)):
            self.leaves[path] = repr(sorted(map(repr, value)))
            return
        pairs: Iterable[tuple[Any, Any]] = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in pairs:
            self._visit(f"{path}[{key!r}]", item, depth + 1)

    def _visit_function(self, path: str, value: types.FunctionType, depth: int) -> None:
        """What a function closes over, its own attributes and the globals beside it."""
        self._enter(value)
        if not _is_users(value.__module__ or ""):
            return
        self._visit_globals(value.__module__, value.__globals__)
        self._visit(path, vars(value), depth + 1)
        if self._follows_code and _is_own(value):
            self._visit_names(path, value, depth)
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                content = cell.cell_contents
            # Not assigned yet.
            except ValueError:
                continue
            self.holders.append((cell, content))
            self._visit(f"{path}.{name}", content, depth + 1)

    def _visit_names(self, path: str, value: types.FunctionType, depth: int) -> None:
        """The globals that a function names, also in modules that it names, and its defaults."""
        self._visit(path, (value.__defaults__, value.__kwdefaults__), depth + 1)
        # The names alone: all globals of a large module would take longer than the trace.
        names = _names_in(value.__code__)
        modules = [value.__globals__.get(name) for name in names]
        modules = [
            module
            for module in modules
            if isinstance(module, types.ModuleType) and _is_own_module(module.__name__)
        ]
        for space in (value.__globals__, *map(vars, modules)):
            held = {name: space[name] for name in names if name in space}
            self.holders.append((Globals(space, held), None))
            for name, item in held.items():
                if isinstance(item, type) and _is_own_module(item.__module__) and id(item) not in self._seen:
                    self._enter(item)
                    self._visit_class(item)
                elif not isinstance(item, (type, types.ModuleType)):
                    self._visit(f"{space.get('__name__', path)}.{name}", item, depth + 1)

    def _visit_cached(self, path: str, value: Any, depth: int) -> None:
        """A function with `functools.lru_cache`: what it has kept is made again."""
        if self._follows_code and _is_own(value.__wrapped__):
            self._enter(value)
            self.cached.append(value)
            self._visit(path, value.__wrapped__, depth)

    def _enter(self, value: Any) -> None:
        self._seen.add(id(value))
        self._kept.append(value)

    def _keep(self, path: str, value: Any) -> None:
        self._kept.append(value)
        self.leaves[path] = "None" if value is None else f"{type(value).__name__} {id(value):#x}"


@dataclass(frozen=True)
class Globals:
    """Some names of a module, and what they stood for."""

    space: dict[str, Any]
    values: dict[str, Any]

    def restore(self) -> None:
        for name, value in self.values.items():
            if self.space.get(name, self) is not value:
                self.space[name] = value


def _is_users(module: str) -> bool:
    return module.split(".")[0] not in ("torch", "builtins", "autoptd", "typing", "abc")


def _is_own(function: Any) -> bool:
    """Whether somebody wrote a function for this model: what is installed is trusted to count nothing by
    itself.
    """
    if not isinstance(function, types.FunctionType) or "site-packages" in function.__code__.co_filename:
        return False
    return (function.__module__ or "").split(".")[0] not in sys.stdlib_module_names


def _is_own_module(name: str) -> bool:
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    return (
        _is_users(name) and name.split(".")[0] not in sys.stdlib_module_names and "site-packages" not in file
    )


def _function_of(member: Any) -> Any:
    """The function behind a static method, a class method or a property."""
    if isinstance(member, property):
        return member.fget
    return member.__func__ if isinstance(member, (staticmethod, classmethod)) else member


def _names_in(code: types.CodeType) -> list[str]:
    """Names that a function's code reads or writes, in the functions within it as well."""
    names = list(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names += _names_in(constant)
    return list(dict.fromkeys(names))


def _plain_names(cls: type) -> dict[str, Any]:
    """The class attributes that a forward may count with."""
    found = {name: value for name, value in vars(cls).items() if isinstance(value, (*PLAIN, dict, list, set))}
    return {name: value for name, value in found.items() if not name.startswith("__")}


def _plain_values(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if isinstance(value, PLAIN)}


def _attributes(value: Any) -> dict[str, Any]:
    """What an object holds, by `__dict__` and by `__slots__`."""
    slots = [name for cls in type(value).__mro__ for name in _as_names(cls.__dict__.get("__slots__", ()))]
    held = {
        name: getattr(value, name) for name in slots if not name.startswith("__") and hasattr(value, name)
    }
    return {**held, **getattr(value, "__dict__", {})}


def _as_names(slots: Any) -> list[str]:
    return [slots] if isinstance(slots, str) else list(slots)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _drawn(value: Any) -> str | None:
    """The state of a source of random or counted numbers."""
    if isinstance(value, random.Random):
        return str(hash(value.getstate()))
    if isinstance(value, itertools.count):
        return repr(value)
    if isinstance(value, types.GeneratorType):
        frame = value.gi_frame
        return "ended" if frame is None else f"at {frame.f_lasti} with {_plain_values(frame.f_locals)}"
    if type(value).__module__.startswith("numpy.random"):
        source = getattr(value, "bit_generator", None) or getattr(value, "_bit_generator", None)
        return repr(source.state) if source is not None else None
    return None
