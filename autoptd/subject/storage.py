"""Refuse parameters that share memory with anything else: the compiled program would keep a copy of each.

Buffers may share theirs with other buffers and attributes: nothing writes to them until others are loaded
(`shared_buffers`).

In: the user's own model, before any copy is made (copies do not share memory). Out: nothing, or a TraceError
that names both tensors. One `nn.Parameter` under two names is tied, and allowed here. Two parameters over the
same memory are not tied in torch either: each has its own gradient and moments, and an optimizer updates the
values twice.

    check_storage(model)      # TraceError: head.weight: shares its memory with emb.weight ...
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from autoptd.compat import FakeTensor
from autoptd.errors import TraceError
from autoptd.ir.buffers import SharedBuffers
from autoptd.subject.attributes import attribute_tensors

TIE = "tie them as one parameter (head.weight = emb.weight), or .clone() one of them"
COPY = "register a .clone() of it, or compute it from the parameter in forward with .detach()"


@dataclass(frozen=True)
class Extent:
    """The bytes of a tensor in its storage, or in the address space where it has values."""

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
        """Tell whether a byte belongs to both: columns of one matrix lie between each other and have
        none in common.
        """
        if self.place != other.place or self.end <= other.start or other.end <= self.start:
            return False
        if self.tensor.is_contiguous() and other.tensor.is_contiguous():
            return True
        first = min(self.start, other.start)
        # Both lie between each other's ends: mark the bytes of one, and look at those of the other.
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
    # Not by identity: views, and Parameters made of one tensor, share memory and are other objects.
    parameters = list(_extents(model.named_parameters()))
    known = {id(extent.tensor) for extent in parameters}
    tensors = _extents(chain(model.named_buffers(), attribute_tensors(model)))
    others = [extent for extent in tensors if id(extent.tensor) not in known]
    for one, two in _overlaps(_by_place([*parameters, *others])):
        both = [extent for extent in (one, two) if id(extent.tensor) in known]
        if len(both) == 2 and not may_tie(one, two):
            first, second = sorted(both, key=parameters.index)
            shared = f"shares its memory with {first.name}"
            fact = f"is a parameter of its own that {shared}: a step of one changes the other"
            raise TraceError(second.name, fact, TIE)
        if len(both) == 1:
            other = two if both[0] is one else one
            fact = f"shares its memory with the parameter {both[0].name}: it would follow training in the model only"
            raise TraceError(other.name, fact, COPY)


def shared_buffers(model: nn.Module) -> SharedBuffers:
    """Find what a value that is loaded into a buffer would change besides."""
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
    # What overlaps the first of some equal buffers overlaps all of them.
    overlaps |= {name: overlaps[twin[0]] for twin in twins for name in twin if twin[0] in overlaps}
    return SharedBuffers(tuple(twins), overlaps)


def _by_place(extents: list[Extent]) -> list[Extent]:
    return sorted(extents, key=lambda extent: (extent.place, extent.start))


def is_same_memory(one: Tensor, two: Tensor) -> bool:
    """Tell whether both begin at the same byte."""
    first, second = Extent.of("", one), Extent.of("", two)
    return first.place == second.place and first.start == second.start


def may_tie(one: Extent, two: Extent) -> bool:
    """Allow frozen parameters, without gradients and moments, to be one: the same view under two names."""
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
    """Map every name of a buffer to its first one: one tensor is one buffer. `wrapper` has the model as `model`."""
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
    """Pairs that overlap, of extents in the order of their starts.

    Those of one object too where that is asked for.
    """
    # A sweep over the addresses: each extent is compared with those that have not ended yet.
    open_: list[Extent] = []
    for extent in ordered:
        open_ = [other for other in open_ if other.place == extent.place and other.end > extent.start]
        for other in open_:
            if (is_same_object or other.tensor is not extent.tensor) and other.overlaps(extent):
                yield other, extent
        open_.append(extent)
