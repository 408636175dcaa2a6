"""Find the layers of a model that are of one kind: only their parameters and buffers tell them apart.

In: a model. Out: `Kinds`, its modules that have at least three others of their kind next to them.

    kinds = Kinds(model)
    member = kinds.of(model.layers[3])       # None for a module without others of its kind

Two modules are alike if they have one class, equal attributes, no hooks, and parameters and buffers of equal sizes
(`Pairs`). Whole numbers may differ: while such a module runs, `Unread` stands for them, and code that reads one fails.
Then this number tells kinds apart (`Kinds.without`).
"""

from __future__ import annotations

import functools
import types
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

from autoptd.subject.contents import PLAIN
from autoptd.trace.layers.stand_in import Metadata
from autoptd.trace.watched import Tally

# Of fewer modules, at most one would not be traced.
FEWEST = 4
# The dicts of a module with tensors.
TENSORS = ("_parameters", "_buffers")


@dataclass
class Member:
    """Hold a module of a kind; `numbers` are the attributes that other members may have other numbers in."""

    path: str
    module: nn.Module
    kind: int = 0
    is_last: bool = False
    numbers: dict[tuple[int, str], tuple[int, dict[str, Any], str]] = field(default_factory=dict)

    @contextmanager
    def unread(self, read: set[str]) -> Iterator[None]:
        """Hide the numbers: code that reads one fails, and its name joins `read`."""
        for _, names, name in self.numbers.values():
            names[name] = Unread(name, read)
        try:
            yield
        finally:
            self.restore()

    def restore(self) -> None:
        for number, names, name in self.numbers.values():
            names[name] = number


class Unread(Tally):
    """Stand for a number; every use of it counts as a read."""

    def __init__(self, name: str, read: set[str]) -> None:
        self._name, self._names = name, read

    @property
    def is_read(self) -> bool:
        return vars(self)["_name"] in vars(self)["_names"]

    @is_read.setter
    def is_read(self, value: bool) -> None:
        vars(self)["_names"].add(vars(self)["_name"])

    __add__ = __radd__ = __iadd__ = __sub__ = __isub__ = Tally._read  # type: ignore[assignment]


class Kinds:
    """Hold the modules of a model that are of one kind with others, by the id of their `__dict__`: torch.export hands out
    proxies of modules, which share it. Numbers in attributes `read` tell them apart.
    """

    def __init__(self, model: nn.Module | None = None, read: Collection[str] = ()) -> None:
        self.model, self.read = model, frozenset(read)
        self.members: dict[int, Member] = {}
        # The path of the last module of each kind.
        self.last: dict[int, str] = {}
        # A module with two paths may be called by either.
        modules = (
            [] if model is None else [module for _, module in model.named_modules(remove_duplicate=False)]
        )
        names = Counter(map(id, modules))
        for number, members in enumerate(find_kinds(model, self.read) if model is not None else ()):
            own = [member for member in members if names[id(member.module)] == 1]
            for member in own:
                member.kind, member.is_last = number, member is own[-1]
                self.last[number] = member.path
                self.members[id(vars(member.module))] = member

    def of(self, module: nn.Module) -> Member | None:
        return self.members.get(id(vars(module)))

    def restore(self) -> None:
        """Restore the numbers: when writes to a module are undone, its attributes are restored too."""
        for member in self.members.values():
            member.restore()

    def without(self, read: Collection[str]) -> Kinds:
        """Return the kinds of the same model after code has read some numbers; none, if it has read no new one."""
        return Kinds(self.model, self.read | set(read)) if set(read) - self.read else Kinds()


def find_kinds(model: nn.Module, read: Collection[str], prefix: str = "") -> Iterator[list[Member]]:
    """Yield modules that are alike, at least `FEWEST`: children of one module, the outermost ones."""
    if any(getattr(torch_modules, name) for name in vars(torch_modules) if _is_hooks(name)):
        return
    groups: list[list[Member]] = []
    for name, child in model.named_children():
        _join(groups, Member(f"{prefix}{name}", child), read)
    for group in groups:
        if len(group) >= FEWEST:
            yield group
        else:
            for member in group:
                yield from find_kinds(member.module, read, f"{member.path}.")


def _join(groups: list[list[Member]], member: Member, read: Collection[str]) -> None:
    """Add a member to the group that it is alike, or to a new one."""
    for group in groups:
        pairs = Pairs(read)
        if pairs.are_alike(group[0].module, member.module):
            group.append(member)
            for one, other, name in pairs.numbers:
                group[0].numbers[id(one), name] = one[name], one, name
                member.numbers[id(other), name] = other[name], other, name
            return
    groups.append([member])


def _is_hooks(name: str) -> bool:
    return name.endswith("_hooks") and name.startswith("_global")


class Pairs:
    """Compare two objects with all that they refer to: nothing may distinguish them but the values of registered parameters and
    buffers, and whole numbers that are attributes of modules. These are listed in `numbers`, but those in `read` must be equal.

    The same references lead to the same objects, or to a pair that is alike: shared objects are shared in the same way.
    """

    def __init__(self, read: Collection[str] = ()) -> None:
        self._read = read
        self.numbers: list[tuple[dict[str, Any], dict[str, Any], str]] = []
        # Both directions, by id; `_kept` keeps the ids unique.
        self._other: dict[int, int] = {}
        self._one: dict[int, int] = {}
        self._kept: list[Any] = []

    def are_alike(self, one: Any, other: Any) -> bool:
        if type(one) is not type(other):
            return False
        if isinstance(one, PLAIN):
            # 0.0 == -0.0.
            return one == other and repr(one) == repr(other)
        if id(one) in self._other or id(other) in self._one:
            return self._other.get(id(one)) == id(other) and self._one.get(id(other)) == id(one)
        self._other[id(one)], self._one[id(other)] = id(other), id(one)
        self._kept += [one, other]
        if one is other:
            return True
        if isinstance(one, nn.Module):
            return self._modules(one, other)
        if isinstance(one, nn.Parameter):
            return self._tensors(one, other)
        if type(one) in (list, tuple, dict, OrderedDict):
            return self._containers(one, other)
        if type(one) is functools.partial:
            parts = ("func", "args", "keywords")
            return all(self.are_alike(getattr(one, part), getattr(other, part)) for part in parts)
        if isinstance(one, types.MethodType):
            return one.__func__ is other.__func__ and self.are_alike(one.__self__, other.__self__)
        is_plain = isinstance(one, (set, frozenset)) and all(isinstance(item, PLAIN) for item in one | other)
        return is_plain and one == other

    def _containers(self, one: Any, other: Any) -> bool:
        if isinstance(one, dict):
            return self.are_alike(list(one.items()), list(other.items()))
        return len(one) == len(other) and all(map(self.are_alike, one, other))

    def _modules(self, one: nn.Module, other: nn.Module) -> bool:
        own, others = vars(one), vars(other)
        if list(own) != list(others):
            return False
        for name, value in own.items():
            if type(value) is int is type(others[name]) and value != others[name] and name not in self._read:
                self.numbers.append((own, others, name))
                is_alike = True
            elif name not in TENSORS:
                is_alike = self.are_alike(value, others[name])
            else:
                is_alike = list(value) == list(others[name]) and all(
                    map(self._tensors, value.values(), others[name].values())
                )
            if not is_alike:
                return False
        return True

    def _tensors(self, one: Tensor | None, other: Tensor | None) -> bool:
        """Compare registered tensors, whose values are inputs of the graph."""
        if one is None or other is None or type(one) is not type(other):
            return one is other
        known = self._other.setdefault(id(one), id(other)), self._one.setdefault(id(other), id(one))
        if (
            known != (id(other), id(one))
            or one.layout is not torch.strided
            or other.layout is not torch.strided
        ):
            return False
        self._kept += [one, other]
        is_same = one.requires_grad == other.requires_grad and Metadata.of(one) == Metadata.of(other)
        return is_same and self.are_alike(vars(one), vars(other))
