"""Read, compare and restore the content of anything that Python code can write to.

In: a container, an object, or one name of a module or class. Out: its entries by the text that names each
(`.calls`, `['n']`, `[0]`), the same for equal content.

    holder = Content(counts)
    before, kept = holder.entries(), holder.kept()      # {"['n']": 0}
    holder.restore(kept)
"""

from __future__ import annotations

import array
import io
import random
import sys
import types
import weakref
import zlib
from collections import OrderedDict, deque
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
CONTAINERS = (dict, list, set, deque)
RAW = (bytearray, array.array)
# Larger arrays are compared by a checksum of their bytes, and not restored.
MAX_BYTES = 1 << 20
MOST_VIEWS = 16


class _Missing:
    def __repr__(self) -> str:
        return "missing"


MISSING = _Missing()
Entries = dict[str, Any]


@dataclass(frozen=True)
class Content:
    """Entries of a container, the bytes of an array, the state of a source of random numbers."""

    holder: Any

    def entries(self) -> Entries:
        return entries_of(self.holder)

    def kept(self) -> Any:
        """Return what `restore` needs."""
        holder = self.holder
        if isinstance(holder, dict):
            return _items(holder)
        return list(holder) if isinstance(holder, CONTAINERS) else self.entries()

    def restore(self, kept: Any) -> None:
        holder = self.holder
        if isinstance(holder, dict):
            if not _is_same_list(_items(holder), kept):
                holder.clear()
                holder.update(kept)
        elif isinstance(holder, list):
            holder[:] = kept
        elif isinstance(holder, set):
            holder.clear()
            holder.update(kept)
        elif isinstance(holder, deque):
            holder.clear()
            holder.extend(kept)
        elif isinstance(holder, RAW):
            _restore_bytes(holder, kept[""])
        elif is_numpy(holder):
            if holder.flags.writeable and not isinstance(kept[""], int):
                holder.flat = kept[""]
        elif isinstance(holder, random.Random) and kept[""] is not None:
            holder.setstate(kept[""])
        elif isinstance(holder, ContextVar) and kept[""] is not MISSING:
            holder.set(kept[""])


@dataclass(frozen=True)
class Registered(Content):
    """Parameters, buffers or modules of a module, each by its identity: another tensor is a change here."""

    def entries(self) -> Entries:
        return {
            f".{name}": value if value is None else f"{type(value).__name__} {id(value):#x}"
            for name, value in self.holder.items()
        }

    def kept(self) -> Any:
        return list(self.holder.items())


@dataclass(frozen=True)
class Attributes:
    """The attributes of an object."""

    holder: Any

    def entries(self) -> Entries:
        return _attributes(self.holder)

    kept = entries

    def restore(self, kept: Entries) -> None:
        _restore_attributes(self.holder, kept)


@dataclass(frozen=True)
class OfModule(Content):
    """The attributes of a module, by its `__dict__`: while torch traces, another object stands for the
    module, with the same one.
    """

    owner: weakref.ref[Any]

    def entries(self) -> Entries:
        return {f".{name}": value for name, value in self.holder.items()}


@dataclass(frozen=True)
class Name:
    """One name of a module, of its globals, or of a class."""

    holder: Any
    name: str

    def entries(self) -> Entries:
        return {f".{self.name}": _names(self.holder).get(self.name, MISSING)}

    kept = entries

    def restore(self, kept: Entries) -> None:
        (value,) = kept.values()
        if _names(self.holder).get(self.name, MISSING) is value:
            return
        if isinstance(self.holder, dict):
            self.holder.pop(self.name, None) if value is MISSING else self.holder.update({self.name: value})
        elif value is MISSING:
            delattr(self.holder, self.name)
        else:
            setattr(self.holder, self.name, value)


@dataclass(frozen=True)
class Cell:
    """A variable of a function around the one that writes it."""

    holder: types.CellType
    name: str

    def entries(self) -> Entries:
        try:
            return {"": self.holder.cell_contents}
        except ValueError:
            return {"": MISSING}

    kept = entries

    def restore(self, kept: Entries) -> None:
        if kept[""] is MISSING:
            with suppress(ValueError):
                del self.holder.cell_contents
        else:
            self.holder.cell_contents = kept[""]


@dataclass(frozen=True)
class Moved:
    """Represent an object without visible content, such as an iterator, that a call has changed."""

    holder: Any
    how: str

    def entries(self) -> Entries:
        return {"": MISSING}

    kept = entries

    def restore(self, kept: Any) -> None:
        pass


Holder = Content | Attributes | Name | Cell | Moved


def entries_of(holder: Any) -> Entries:
    """Return what an object holds, each by the text that names it."""
    if isinstance(holder, dict):
        return {f"[{_text_of_key(key)}]": value for key, value in _items(holder)}
    if isinstance(holder, (list, deque)):
        return {f"[{i}]": value for i, value in enumerate(holder)}
    if isinstance(holder, set):
        return {"": sorted(map(_text_of_key, holder))}
    if is_opaque(holder):
        return {"": state_of(holder)}
    return _attributes(holder)


def with_values(holder: Holder, values: Entries) -> Any:
    """Return what `restore` needs to give some entries of a holder other values."""
    kept = holder.kept()
    if isinstance(kept, dict):
        return {**kept, **values}
    if isinstance(holder, OfModule):
        return [(key, values.get(f".{key}", value)) for key, value in kept]
    if isinstance(holder.holder, dict):
        return [(key, values.get(f"[{_text_of_key(key)}]", value)) for key, value in kept]
    return [values.get(f"[{i}]", value) for i, value in enumerate(kept)]


def _items(holder: dict[Any, Any]) -> list[tuple[Any, Any]]:
    # Of a class's own method only the order of an OrderedDict is needed.
    return list((OrderedDict if isinstance(holder, OrderedDict) else dict).items(holder))


def has_entries(value: Any) -> bool:
    """Tell whether what an object holds are entries of a container, or attributes."""
    if isinstance(
        value, (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType)
    ):
        return False
    is_object = hasattr(value, "__dict__") or bool(slots_of(value))
    return isinstance(value, (*CONTAINERS, tuple)) or (is_object and not is_opaque(value))


def is_opaque(holder: Any) -> bool:
    """Tell whether an object's content is not in attributes, but in a value that identifies it."""
    return isinstance(holder, (*RAW, random.Random, io.StringIO, io.BytesIO, ContextVar)) or (
        is_numpy(holder) or _is_drawing(holder) or type(type(holder)).__module__ == "_ctypes"
    )


def state_of(holder: Any) -> Any:
    """Return a value that is equal as long as the content of an opaque object is unchanged."""
    if isinstance(holder, random.Random):
        # One that is being made has no state yet, and one of the system's never has.
        has_state = hasattr(holder, "gauss_next") and not isinstance(holder, random.SystemRandom)
        return holder.getstate() if has_state else None
    if isinstance(holder, (io.StringIO, io.BytesIO)):
        return holder.getvalue(), holder.tell()
    if isinstance(holder, ContextVar):
        return holder.get(MISSING)
    if is_numpy(holder):
        if holder.dtype.hasobject:
            return holder.copy()
        return holder.copy() if holder.nbytes <= MAX_BYTES else zlib.crc32(holder.tobytes())
    if _is_drawing(holder):
        source = getattr(holder, "bit_generator", None) or getattr(holder, "_bit_generator", holder)
        return repr(getattr(source, "state", source))
    # Of a pointer also what it points to.
    return bytes(holder) + (bytes(holder.contents) if hasattr(type(holder), "contents") and holder else b"")


def base_of(value: Any) -> Any:
    """Return what an array, a view of bytes, or a value of C's is a view of."""
    for _ in range(MOST_VIEWS):
        below = getattr(value, "obj", None) if isinstance(value, memoryview) else None
        if below is None and type(value).__module__.split(".")[0] == "numpy":
            below = getattr(value, "base", None)
        if below is None and type(type(value)).__module__ == "_ctypes":
            # It keeps what it was made of alive: `from_buffer` a view of bytes.
            kept = value._objects.values() if isinstance(value._objects, dict) else ()
            below = value._b_base_ or next((one for one in kept if isinstance(one, memoryview)), None)
        # An array over a tensor's memory is compared as an array: writes to it pass the tensor by.
        if below is None or isinstance(below, torch.Tensor):
            break
        value = below
    return value


def is_numpy(holder: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(holder, numpy.ndarray)


def _is_drawing(holder: Any) -> bool:
    return type(holder).__module__.startswith("numpy.random")


def _attributes(holder: Any) -> Entries:
    """What an object holds, by `__dict__` and by `__slots__`."""
    found = {f".{name}": value for name, value in _names(holder).items()}
    for name in slots_of(holder):
        with suppress(AttributeError):
            found[f".{name}"] = getattr(holder, name)
    return found


def _restore_attributes(holder: Any, kept: Entries) -> None:
    now = _attributes(holder)
    if now.keys() == kept.keys() and all(now[name] is kept[name] for name in now):
        return
    names, slots = getattr(holder, "__dict__", {}), set(slots_of(holder))
    plain = {name[1:]: value for name, value in kept.items() if name[1:] not in slots}
    if not _is_same_list(list(names.items()), list(plain.items())):
        names.clear()
        names.update(plain)
    for name in slots:
        if f".{name}" in kept:
            object.__setattr__(holder, name, kept[f".{name}"])
        elif f".{name}" in now:
            object.__delattr__(holder, name)


def slots_of(holder: Any) -> list[str]:
    found = []
    for cls in type(holder).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        found += [slots] if isinstance(slots, str) else list(slots)
    return [name for name in found if not name.startswith("__")]


def _names(holder: Any) -> Any:
    if isinstance(holder, dict):
        return holder
    return getattr(holder, "__dict__", {})


def _restore_bytes(holder: Any, kept: bytes) -> None:
    if isinstance(holder, bytearray):
        holder[:] = kept
    else:
        del holder[:]
        holder.frombytes(kept)


def _is_same_list(one: list[tuple[Any, Any]], other: list[tuple[Any, Any]]) -> bool:
    if len(one) != len(other):
        return False
    return all(a[0] is b[0] and a[1] is b[1] for a, b in zip(one, other, strict=True))


def _text_of_key(key: Any) -> str:
    """The text of a key, the same at every call."""
    return repr(key) if isinstance(key, (*PLAIN, tuple)) else f"{type(key).__name__} {id(key):#x}"
