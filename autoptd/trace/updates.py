"""List the buffers that a traced forward updates, and check that the updates are allowed.

In: a TRACED graph. Out: the value of each buffer after the call.

    dict(updated_buffers(graph))        # {"norm.running_mean": the node of its new value}
"""

from __future__ import annotations

from collections.abc import Iterator, Set

from torch import nn
from torch.fx import Graph, Node

from autoptd.errors import PlanError
from autoptd.ir.notes import op_name, ops, site
from autoptd.ir.updates import UPDATE
from autoptd.subject.storage import shared_buffers

IN_MODEL = "a loss that is a part of the model, whose forward then returns it"
IN_PLACE = "buffers of their own (.clone()), or one tensor that is a registered buffer under both names and changed in place"


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
            fact = f"buffer {lost[0]} is updated by the forward, and neither state dict nor checkpoint has it"
            raise PlanError(site(new), fact, IN_MODEL)
        names = shared.names_of(name)
        others = [twin for twin in names if own[twin] is not own[name]]
        # The names of a module that is registered twice refer to the same buffer slot.
        if len({_place(model, twin) for twin in names}) > 1 and not assigned.isdisjoint(names):
            others += [twin for twin in names if twin != name]
        if name in shared.overlaps:
            others.append(shared.overlaps[name])
        if others:
            fact = f"buffer {name} is updated by the forward, and shares its memory with {others[0]}"
            raise PlanError(site(new), fact, IN_PLACE)


def _place(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, attribute = name.rpartition(".")
    return model.get_submodule(path), attribute


__all__ = ["check_updates", "updated_buffers"]
