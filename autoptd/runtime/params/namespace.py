"""Expose the tensors of a stage to emitted code as attributes, under the model's own names.

In: tensors by dotted name. Out: a tree of namespaces, one per module.

    w = make_namespace({"transformer.h.3.ln_1.weight": x})
    w.transformer.h[3].ln_1.weight                      # x
    w.transformer.h[3].at("attn.c_proj")                # "transformer.h.3.attn.c_proj"

Parameters whose gather after an update is pending are withheld: their attributes are removed, and the first
read of one waits for the gather. So a layer can run while the parameters of later ones are being gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from autoptd.ir.names import METHODS, star


class Namespace:
    """Tensors by dotted name: `h.0.bias` is `.h[0].bias`. Built once; reading is plain attribute access.

    Names with a leading underscore, names of methods and names that are not Python identifiers are items:
    `["my-emb"].weight`. `path` is its module's path in the model.
    """

    def __init__(self, path: str = "", *, is_starred: bool = False) -> None:
        self._items: dict[int | str, Any] = {}
        # For tensors with a pending gather: the wait before they are read.
        self._awaited: dict[int | str, Withheld] = {}
        self._is_starred = is_starred
        self._path = star(path) if is_starred else path
        self._prefix = f"{self._path}." if path else ""

    def at(self, name: str = "") -> str:
        """Return the path of a module or parameter below this one: the site of a layer's collectives."""
        return self._prefix + name if name else self._path

    def __getitem__(self, key: int | str) -> Any:
        if (withheld := self._awaited.get(key)) is not None:
            withheld.give_back()
        return self._items[key]

    def __getattr__(self, part: str) -> Any:
        # Called for missing attributes only, so present ones are read without overhead.
        if (key := _key(part)) in self.__dict__.get("_awaited", ()):
            return self[key]
        raise AttributeError(f"{self._path or 'the model'} has no {part!r}")

    def _put(self, name: str, value: torch.Tensor) -> None:
        """Store `value` under a dotted name."""
        # "h.0.ln.weight" is stored in the namespaces "", "h", "h.0" and "h.0.ln".
        *path, last = name.split(".")
        node = self
        for part in path:
            child = node._items.get(_key(part))
            if child is None:
                child = Namespace(node.at(part), is_starred=self._is_starred)
                node._set(part, child)
            node = child
        node._set(last, value)

    def _set(self, part: str, value: Any) -> None:
        # As an item always, as an attribute where that hides nothing of the class: `.h[0]`, but `["at"]`.
        self._items[_key(part)] = value
        if _is_attribute(part):
            setattr(self, part, value)


def _is_attribute(part: str) -> bool:
    return not part.isdecimal() and not part.startswith("_") and part not in METHODS


def _key(part: str) -> int | str:
    # "007" is a name, not the number 7.
    return int(part) if part.isdecimal() and str(int(part)) == part else part


def make_namespace(tensors: Mapping[str, torch.Tensor], *, is_starred: bool = False) -> Namespace:
    """Return the tensors of a flat mapping as a tree; `is_starred`: all layers have one path, `transformer.h.*`."""
    root = Namespace(is_starred=is_starred)
    for name, tensor in tensors.items():
        root._put(name, tensor)
    return root


class _Place(NamedTuple):
    """Where a tensor is read."""

    node: Namespace
    key: int | str
    # None if it is only an item.
    attribute: str | None
    tensor: torch.Tensor


class Withheld:
    """Tensors that one gather fills: while withheld, the first read of one waits for it, and puts all of them back."""

    def __init__(self) -> None:
        self._places: list[_Place] = []
        self._wait: Callable[[], object] = bool
        self._is_withheld = False

    def add(self, root: Namespace, name: str) -> None:
        """Add the tensor of a dotted name; if those in other stages are withheld, so is this one."""
        *path, last = name.split(".")
        node = root
        for part in path:
            node = node._items[_key(part)]
        key = _key(last)
        place = _Place(node, key, last if _is_attribute(last) else None, node._items[key])
        self._places.append(place)
        if self._is_withheld:
            self._remove(place)

    def withhold(self, wait: Callable[[], object]) -> None:
        """Remove them from their namespaces: the first read of one calls `wait`."""
        self._wait = wait
        for place in () if self._is_withheld else self._places:
            self._remove(place)
        self._is_withheld = True

    def _remove(self, place: _Place) -> None:
        node, key, attribute, _ = place
        node._awaited[key] = self
        del node._items[key]
        if attribute is not None:
            del node.__dict__[attribute]

    def give_back(self) -> None:
        """Wait for the gather, and put them back; does nothing if they are not withheld."""
        if not self._is_withheld:
            return
        # What waits may give them back itself.
        self._is_withheld = False
        try:
            self._wait()
        except BaseException:
            self._is_withheld = True
            raise
        for node, key, attribute, tensor in self._places:
            del node._awaited[key]
            node._items[key] = tensor
            if attribute is not None:
                node.__dict__[attribute] = tensor
