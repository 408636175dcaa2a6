"""Buffers that a forward changes: saved and restored around a call, updated in a traced graph.

kept, assigned = KeptBuffers(model), AssignedBuffers(model, loss_fn)
model(x)
assigned.take()                     # {"count": tensor(1)}: of `self.count = self.count + 1`; the model's own is back
kept.put_back()                     # {"norm.running_mean": ...}: their values after the call; the old ones are back

dict(updated_buffers(graph))        # {"norm.running_mean": the node of its new value}
check_updates(graph, model, {"count"})
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Set
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node

from autoptd.compat import FakeTensor
from autoptd.errors import PlanError
from autoptd.ir.buffers import same_entries
from autoptd.ir.notes import op_name, ops, site
from autoptd.ir.updates import UPDATE
from autoptd.subject.storage import shared_buffers


class AssignedBuffers:
    """Save the buffers of a model, and of a loss function that is a module, to restore replaced ones."""

    def __init__(self, model: nn.Module, loss_fn: Any = None) -> None:
        # (the dict that holds it, its key there, its path, the buffer)
        self._buffers: list[tuple[dict[str, Any], str, str, Tensor]] = []
        modules = dict(model.named_modules())
        if isinstance(loss_fn, nn.Module):
            modules |= dict(loss_fn.named_modules(prefix="loss_fn"))
        for path, module in modules.items():
            for name, buffer in module._buffers.items():
                if isinstance(buffer, Tensor):
                    self._buffers.append((module._buffers, name, f"{path}.{name}".removeprefix("."), buffer))

    def take(self) -> dict[str, Tensor]:
        """Restore buffers that were replaced by tensors of the same shape; return the replacements by path.

        In a trace, this adds an operator that writes the new values to the buffer.
        """
        assigned: dict[str, Tensor] = {}
        for holder, name, path, buffer in self._buffers:
            new = holder.get(name, buffer)
            if new is buffer or new is None or (new.shape, new.dtype) != (buffer.shape, buffer.dtype):
                continue
            holder[name] = buffer
            # Outside of a trace backward may need the old value of the buffer.
            if isinstance(buffer, FakeTensor):
                buffer.copy_(new.detach())
            assigned[path] = new.detach()
        return assigned


class KeptBuffers:
    """Save the buffers of a model, to restore them after a forward that may write to them."""

    def __init__(self, model: nn.Module) -> None:
        self._tensors = dict(model.named_buffers())
        self._values = {name: buffer.detach().clone() for name, buffer in self._tensors.items()}

    def put_back(self) -> dict[str, torch.Tensor]:
        """Restore the buffers that have changed; return their changed values."""
        changed: dict[str, torch.Tensor] = {}
        for name, buffer in self._tensors.items():
            # The forward may have added a value with a gradient.
            if buffer.grad_fn is not None:
                buffer.detach_()
            if not _is_unchanged(self._values[name], buffer):
                changed[name] = buffer.clone()
                buffer.copy_(self._values[name])
        return changed


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the largest difference of two values of a buffer, relative to its largest entry."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return math.inf
    if one.is_floating_point() or one.is_complex():
        gap = (one - other).abs().nan_to_num(0.0)
        return float(gap.max() / one.abs().nan_to_num().max().clamp(min=1e-30)) if one.numel() else 0.0
    return 0.0 if torch.equal(one, other) else math.inf


def _is_unchanged(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    has_nan = one.is_floating_point() and one.dtype.itemsize > 1
    return torch.equal(one.nan_to_num(), other.nan_to_num()) if has_nan else same_entries(one, other)


IN_MODEL = "make the loss a part of the model, whose forward then returns it"
IN_PLACE = "separate buffers (.clone()), or one registered buffer under both names, changed in place"


def updated_buffers(graph: Graph) -> Iterator[tuple[str, Node]]:
    """Yield (name, new value) of every buffer that the forward updates."""
    for node in ops(graph):
        if op_name(node) == UPDATE:
            yield node.args[2], node.args[1]  # type: ignore[misc]


def check_updates(graph: Graph, model: nn.Module, assigned: Set[str]) -> None:
    """Raise PlanError for an update of a buffer that is not saved, or has an alias that would not follow.

    Names of one tensor are one buffer (`first_names`) and follow, unless one of them is `assigned` another
    tensor.
    """
    updates = dict(updated_buffers(graph))
    if not updates:
        return
    own, shared = dict(model.named_buffers(remove_duplicate=False)), shared_buffers(model)
    for name, new in updates.items():
        if lost := [of_loss for of_loss in (name, *assigned) if of_loss not in own]:
            fact = f"buffer {lost[0]} is updated by the forward, but is not in the model's state dict, nor in checkpoints"
            raise PlanError(site(new), fact, IN_MODEL)
        names = shared.names_of(name)
        others = [twin for twin in names if own[twin] is not own[name]]
        # The names of a module that is registered twice refer to the same buffer slot.
        if len({_place(model, twin) for twin in names}) > 1 and not assigned.isdisjoint(names):
            others += [twin for twin in names if twin != name]
        if name in shared.overlaps:
            others.append(shared.overlaps[name])
        if others:
            fact = f"buffer {name} is updated by the forward, and shares memory with {others[0]}"
            raise PlanError(site(new), fact, IN_PLACE)


def _place(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, attribute = name.rpartition(".")
    return model.get_submodule(path), attribute
