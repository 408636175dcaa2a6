"""A rank's copies of the buffers that a program reads: rank 0's values, sent once.

In: a program, this rank's world, and the buffers that it has of other programs of the model. Out: buffers by name.

    buffers = receive_buffers(program, world)
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from autoptd.ir.buffers import same_entries
from autoptd.program.program import Program
from autoptd.runtime.parts import from_rank_0
from autoptd.runtime.world.world import World


def receive_buffers(
    program: Program, world: World, known: Mapping[str, torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """Return the program's buffers on this rank; those that are `known` with the same values are shared. A collective."""
    buffers: dict[str, torch.Tensor] = {}
    # Broadcasts, so all ranks need one order; copies, because the program's are the user's own storage.
    for name, buffer in sorted(program.buffers.items()):
        own, other = from_rank_0(world, name, buffer), (known or {}).get(name)
        is_known = other is not None and other.dtype == own.dtype and same_entries(other, own)
        buffers[name] = other if other is not None and is_known else own.clone()
    return buffers


__all__ = ["receive_buffers"]
