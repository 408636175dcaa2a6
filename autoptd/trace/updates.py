"""The buffers that a traced forward updates, and which of them it may.

In: a TRACED graph. Out: what each buffer holds after the call.

    dict(updated_buffers(graph))        # {"norm.running_mean": the node of its new value}
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.fx import Graph, Node

from autoptd.errors import PlanError
from autoptd.ir.notes import op_name, ops, site
from autoptd.ir.updates import UPDATE
from autoptd.trace.storage import shared_buffers


def updated_buffers(graph: Graph) -> Iterator[tuple[str, Node]]:
    """Return (name, new value) of every buffer that the forward updates."""
    for node in ops(graph):
        if op_name(node) == UPDATE:
            yield node.args[2], node.args[1]  # type: ignore[misc]


def check_updates(graph: Graph, model: nn.Module) -> None:
    """Raise PlanError for an update of a buffer that shares its memory: the other one would not follow."""
    updates = dict(updated_buffers(graph))
    shared = shared_buffers(model) if updates else None
    for name, new in updates.items():
        assert shared is not None
        others = [other for names in shared.twins if name in names for other in names if other != name]
        if name in shared.overlaps:
            others.append(shared.overlaps[name])
        if others:
            fact = f"buffer {name} is updated by the forward, and shares its memory with {others[0]}"
            remedy = "one name for it (a module that is registered twice has two), or buffers of their own: .clone()"
            raise PlanError(site(new), fact, remedy)


__all__ = ["check_updates", "updated_buffers"]
