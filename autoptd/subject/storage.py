"""Find the tensors of a model, and the memory that they share.

In: the user's own model, before any copy is made (copies do not share memory). Out: the tensors in plain
attributes, the names of tied parameters, the buffers that share memory; or a TraceError for parameters that
share memory, since the compiled program would keep separate copies.

    dict(attribute_tensors(model))      # {"rope.table": tensor(...)}
    check_storage(model)                # TraceError: head.weight: shares its memory with emb.weight ...

One `nn.Parameter` under two names is tied, and allowed. Two parameters over the same memory are not tied in
torch either: each has its own gradient and moments, and an optimizer updates the values twice. Buffers may
share memory with other buffers and attributes: nothing writes to them until other values are loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from autoptd.compat import FakeTensor
from autoptd.errors import TraceError
from autoptd.ir.buffers import SharedBuffers, same_entries
from autoptd.subject.contents import PLAIN, entries_of, has_entries

TIE = "tie them as one parameter (head.weight = emb.weight), or .clone() one of them"
COPY = "register a .clone() of it, or compute it from the parameter in forward with .detach()"


@dataclass(frozen=True)
class Extent:
    """The bytes of a tensor in its storage or, if it has values, in the address space."""

    name: str
    tensor: Tensor
    # 0 for real memory, else the storage.
    home: int
    start: int
    end: int

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> Extent:
        storage, size = tensor.untyped_storage(), tensor.element_size()
        home = storage._cdata if tensor.is_meta or isinstance(tensor, FakeTensor) else 0
        start = tensor.storage_offset() * size + (0 if home else storage.data_ptr())
        steps = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
        return cls(name, tensor, home, start, start + (steps + 1) * size)

    @property
    def place(self) -> tuple[str, int]:
        return str(self.tensor.device), self.home

    def equals(self, other: Extent) -> bool:
        """Tell whether both are the same view of the same memory."""
        one, two = self.tensor, other.tensor
        is_same = self.start == other.start and one.shape == two.shape and one.dtype == two.dtype
        return is_same and one.stride() == two.stride()

    def overlaps(self, other: Extent) -> bool:
        """Tell whether a byte belongs to both; interleaved columns of one matrix do not overlap."""
        if self.place != other.place or self.end <= other.start or other.end <= self.start:
            return False
        if self.tensor.is_contiguous() and other.tensor.is_contiguous():
            return True
        first = min(self.start, other.start)
        # Their ranges overlap: mark the bytes of one, and check those of the other.
        taken = torch.zeros(max(self.end, other.end) - first, dtype=torch.bool, device="cpu")
        self._bytes(taken, first).fill_(True)
        return bool(other._bytes(taken, first).any())

    def _bytes(self, taken: Tensor, first: int) -> Tensor:
        size = self.tensor.element_size()
        strides = [stride * size for stride in self.tensor.stride()]
        return taken.as_strided([*self.tensor.shape, size], [*strides, 1], self.start - first)


def check_storage(model: nn.Module) -> None:
    """Refuse a parameter that overlaps another one, a buffer, or a tensor that a module keeps as a plain
    attribute.
    """
    # Not by identity: views, and Parameters made of one tensor, are different objects over the same memory.
    parameters = list(_extents(model.named_parameters()))
    known = {id(extent.tensor) for extent in parameters}
    tensors = _extents(chain(model.named_buffers(), attribute_tensors(model)))
    others = [extent for extent in tensors if id(extent.tensor) not in known]
    for one, two in _overlaps(_by_place([*parameters, *others])):
        both = [extent for extent in (one, two) if id(extent.tensor) in known]
        if len(both) == 2 and not may_tie(one, two):
            first, second = sorted(both, key=parameters.index)
            shared = f"shares its memory with {first.name}"
            fact = f"is a separate parameter that {shared}: a step of one changes the other"
            raise TraceError(second.name, fact, TIE)
        if len(both) == 1:
            other = two if both[0] is one else one
            fact = f"shares its memory with the parameter {both[0].name}: it would follow training in the model only"
            raise TraceError(other.name, fact, COPY)


def shared_buffers(model: nn.Module) -> SharedBuffers:
    """Find what else changes when a value is loaded into a buffer."""
    groups: list[list[Extent]] = []
    for extent in _extents(model.named_buffers(remove_duplicate=False)):
        same = [group for group in groups if group[0].place == extent.place and group[0].equals(extent)]
        if same:
            same[0].append(extent)
        else:
            groups.append([extent])
    names = {extent.name for group in groups for extent in group}
    firsts = [group[0] for group in groups]
    others = [
        extent for extent in _extents(attribute_tensors(model)) if not isinstance(extent.tensor, nn.Parameter)
    ]
    overlaps: dict[str, str] = {}
    for one, two in _overlaps(_by_place([*firsts, *others]), is_same_object=True):
        overlaps |= {here.name: there.name for here, there in ((one, two), (two, one)) if here.name in names}
    twins = []
    for group in groups:
        if len(group) > 1:
            twins.append(tuple(extent.name for extent in group))
    # A tensor that overlaps the first of several equal buffers overlaps all of them.
    overlaps |= {name: overlaps[twin[0]] for twin in twins for name in twin if twin[0] in overlaps}
    return SharedBuffers(tuple(twins), overlaps)


def _by_place(extents: list[Extent]) -> list[Extent]:
    return sorted(extents, key=lambda extent: (extent.place, extent.start))


def is_same_memory(one: Tensor, two: Tensor) -> bool:
    """Tell whether both begin at the same byte."""
    first, second = Extent.of("", one), Extent.of("", two)
    return first.place == second.place and first.start == second.start


def may_tie(one: Extent, two: Extent) -> bool:
    """Tell whether two parameters may count as tied: the same view, and frozen, so without gradients and
    moments.
    """
    return one.equals(two) and not (one.tensor.requires_grad or two.tensor.requires_grad)


def tied_names(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Map the first name of every parameter to all its names: tied weights are one parameter."""
    groups: dict[int, list[str]] = {}
    frozen: dict[object, int] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        # One object is one parameter; frozen ones may also be two objects over the same memory.
        key = id(parameter)
        if not parameter.requires_grad and parameter.numel() and not is_lazy(parameter):
            at = Extent.of(name, parameter)
            view = (at.place, at.start, parameter.shape, parameter.stride(), parameter.dtype)
            key = frozen.setdefault(view, key)
        groups.setdefault(key, []).append(name)
    return {names[0]: tuple(names) for names in groups.values()}


def first_names(wrapper: nn.Module) -> dict[str, str]:
    """Map every name of a buffer to its first one: one tensor is one buffer. `wrapper` has the model as
    `model`.
    """
    firsts: dict[int, str] = {}
    found: dict[str, str] = {}
    for name, buffer in wrapper.named_buffers(remove_duplicate=False):
        name = name.removeprefix("model.")
        found[name] = firsts.setdefault(id(buffer), name)
    return found


def _extents(named: Iterator[tuple[str, Tensor]]) -> Iterator[Extent]:
    for name, tensor in named:
        if not is_lazy(tensor) and tensor.layout == torch.strided and tensor.numel():
            yield Extent.of(name, tensor)


def _overlaps(ordered: list[Extent], *, is_same_object: bool = False) -> Iterator[tuple[Extent, Extent]]:
    """Yield pairs that overlap, of extents in the order of their starts.

    With `is_same_object`, also those of one object.
    """
    # Sweep over the addresses: compare each extent with those that have not ended yet.
    open_: list[Extent] = []
    for extent in ordered:
        open_ = [other for other in open_ if other.place == extent.place and other.end > extent.start]
        for other in open_:
            if (is_same_object or other.tensor is not extent.tensor) and other.overlaps(extent):
                yield other, extent
        open_.append(extent)


# Attributes of nn.Module itself: hooks, and the dicts of parameters, buffers and modules.
OWN = {key for key in vars(nn.Module()) if key.startswith("_")}
# Levels of nesting to search.
DEEPEST = 5


def check_state_dict(model: nn.Module) -> None:
    """Refuse a state dict other than the parameters and buffers by name, which ranks load and save."""
    own = dict(model.named_parameters(remove_duplicate=False))
    expected = own | dict(model.named_buffers(remove_duplicate=False))
    found = model.state_dict(keep_vars=True)
    more = [name for name in found if name not in expected]
    other = [name for name, attribute in own.items() if not _is_equal(found.get(name), attribute)]
    if more or other:
        what = []
        if more:
            what.append(f"has {', '.join(more)} in addition")
        if other:
            what.append(f"lacks or changes {', '.join(other)}")
        fact = f"is not its parameters and buffers: it {' and '.join(what)}, which the ranks would not follow"
        remedy = "leave out get_extra_state and hooks of state_dict; keep state in buffers"
        raise TraceError("state_dict of the model", fact, remedy)


def _is_equal(found: Tensor | None, own: Tensor) -> bool:
    if found is own or found is None:
        return found is own
    return found.shape == own.shape and (own.is_meta or same_entries(found, own))


def attribute_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors that modules keep as plain attributes, in containers as well: neither parameters nor
    buffers.
    """
    for path, value in held_by(model):
        if isinstance(value, Tensor):
            yield path, value


def map_attribute_tensors(model: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Replace the tensors that modules keep as plain attributes, in lists and dicts as well."""
    holders = [vars(module) for module in model.modules()]
    for _, value in held_by(model):
        if isinstance(value, (dict, list)):
            holders.append(value)  # type: ignore[arg-type]
        elif not isinstance(value, (Tensor, *PLAIN)) and hasattr(value, "__dict__"):
            holders.append(vars(value))
    for holder in holders:
        for key, item in list(holder.items() if isinstance(holder, dict) else enumerate(holder)):
            if isinstance(item, Tensor) and (made := change(item)) is not item:
                holder[key] = made


@contextmanager
def own_containers(model: nn.Module) -> Iterator[None]:
    """Restore the attributes of modules, which a trace marks for its own use."""
    kept = [(vars(module), dict(vars(module))) for module in model.modules()]
    try:
        yield
    finally:
        for names, own in kept:
            names.update(own)


def held_by(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the objects in plain attributes of modules, and the objects that these hold, by path."""
    seen: set[int] = set()
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name not in OWN:
                yield from _walk(f"{path}.{name}".removeprefix("."), value, 0, seen)


def _walk(path: str, value: Any, depth: int, seen: set[int]) -> Iterator[tuple[str, Any]]:
    # Modules are visited by the model's own list, under their names.
    if isinstance(value, nn.Module):
        return
    yield path, value
    if isinstance(value, (Tensor, *PLAIN)) or id(value) in seen or depth > DEEPEST or not has_entries(value):
        return
    seen.add(id(value))
    if isinstance(value, (tuple, list)):
        for i, item in enumerate(value):
            yield from _walk(f"{path}[{i}]", item, depth + 1, seen)
    elif not isinstance(value, set):
        for name, item in entries_of(value).items():
            yield from _walk(f"{path}{name}", item, depth + 1, seen)
