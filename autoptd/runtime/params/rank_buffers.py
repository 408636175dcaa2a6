"""Broadcast the buffers that a program reads from rank 0, once.

In: a program, this rank's world, and its buffers from other programs of the model. Out: buffers by name.

    buffers = receive_buffers(program, world)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from autoptd.ir.buffers import same_entries
from autoptd.program.program import Program
from autoptd.runtime.params.parts import from_rank_0
from autoptd.runtime.world.world import World


@dataclass(frozen=True)
class KnownBuffers:
    """The buffers of a rank by name, and the names of updated ones, which all programs share."""

    values: Mapping[str, torch.Tensor] = field(default_factory=dict)
    updated: frozenset[str] = frozenset()


def receive_buffers(
    program: Program, world: World, known: KnownBuffers | None = None
) -> dict[str, torch.Tensor]:
    """Return the program's buffers on this rank; those that are `known` with the same values are shared. A collective."""
    known = known or KnownBuffers()
    updated = known.updated.union(program.updated)
    buffers: dict[str, torch.Tensor] = {}
    # Broadcasts, so all ranks need one order; copies, because the program's are the user's own storage.
    for name, buffer in sorted(program.buffers.items()):
        own, other = from_rank_0(world, name, buffer), known.values.get(name)
        is_known = other is not None and other.dtype == own.dtype
        # An updated buffer keeps its current value, whatever the program was compiled with.
        is_known = is_known and other is not None and (name in updated or same_entries(other, own))
        buffers[name] = other if other is not None and is_known else own.clone()
    return buffers


__all__ = ["KnownBuffers", "receive_buffers"]
