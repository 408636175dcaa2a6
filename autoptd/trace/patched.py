"""Hold state that a program can patch: names in a class or module, a function, an object's class, a setting.

In: one of these. Out: its content by a text that names each entry, and a way to restore it, as in
`subject/contents.py`.

    holder = Names(torch.nn.functional, frozenset({"gelu"}))
    before, kept = holder.entries(), holder.kept()      # {".gelu": <built-in function gelu>}
    holder.restore(kept)                                # also after F.gelu = F.relu
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from autoptd.subject.contents import MISSING, Entries

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


def _is_operator(name: str, value: Any) -> bool:
    is_special = name.startswith("__") and name.endswith("__")
    return is_special and isinstance(getattr(value, "__func__", value), types.FunctionType)


__all__ = ["ClassOf", "Names", "OfFunction", "Setting", "settings_of"]
