"""Hold buffers: those that a rank's programs read, and the model's persistent ones, which its state dict has.

In: a program and this rank's world; the model's state dict, and values loaded later. Out: the buffers of a rank by name,
broadcast from rank 0 once; the program with the model's buffers, and the ranks' copies set to the loaded values. The
compiler may have specialised on the value of a buffer (`ir/buffers.py`): other values are rejected here, or make the
caller compile again.

    on_rank = receive_buffers(program, world)
    buffers = ModelBuffers(shared)
    program = buffers.take(program, model.state_dict(), weights=None)
    new = buffers.values_of(state_dict); buffers.load(new)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from autoptd.errors import PlanError
from autoptd.ir.buffers import SharedBuffers, same_entries
from autoptd.program.program import Program
from autoptd.program.sources import Source
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


LOAD_BEFORE = "load it before: model.load_state_dict(...), then parallelize(model, ...)"
LOAD_THEM_BEFORE = LOAD_BEFORE.replace("load it", "load them")


class ModelBuffers:
    """Persistent buffers by name (`values`); `shared` says which of them share their memory."""

    def __init__(self, shared: SharedBuffers) -> None:
        self.values: dict[str, torch.Tensor] = {}
        self.shared = shared
        # Names whose values were loaded since the ranks were started.
        self.loaded: set[str] = set()
        # Names of those that a forward updates: their values are tensors of the first rank of this process.
        self.updated: set[str] = set()

    def take(self, program: Program, state: Mapping[str, torch.Tensor], weights: Source | None) -> Program:
        """Keep the buffers of `state`, and return the program with them in it.

        A buffer on meta comes from the source `weights`, else from the program. PlanError where the program
        was compiled for other values.
        """
        parameters = {name for spec in program.params for name in (spec.name, *spec.aliases)}
        reader = weights.reader() if weights is not None else None
        for name, x in state.items():
            if name in parameters:
                continue
            if x.is_meta and reader is not None and reader.has(name):
                x = reader.whole(name).to(x.dtype)
            if x.is_meta:
                x = program.buffers.get(name, x)
            # A copy, because training must not change the user's model.
            self.values[name] = x.clone()
        if changed := program.differing(self.values):
            fact = f"the program was compiled for other values of {', '.join(changed)} than the model has"
            raise PlanError("model", fact, "compile it for this model")
        buffers = {name: self.values.get(name, x).to(x.dtype) for name, x in program.buffers.items()}
        return replace(program, buffers=buffers)

    def follow(self, program: Program, on_rank: Mapping[str, torch.Tensor]) -> None:
        """Hold a rank's own tensors of the buffers that the forward of a program updates."""
        for first in program.updated:
            for name in self.shared.names_of(first):
                if name in self.values:
                    self.values[name] = on_rank[first]
                    self.updated.add(name)

    def saved(self) -> dict[str, torch.Tensor]:
        """Return the values for a checkpoint, which may be written while the next step updates them."""
        return {name: x.clone() if name in self.updated else x for name, x in self.values.items()}

    def now(self, on_rank: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the current values of the model's buffers, given those of a rank."""
        return self.shared.complete({**self.values, **on_rank})

    def values_of(self, state_dict: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the buffers in `state_dict`, in our dtypes and on our devices.

        PlanError for another value of a buffer that overlaps something else: the ranks hold copies of both.
        """
        brought = {}
        for name, own in self.values.items():
            if (x := state_dict.get(name)) is not None:
                brought[name] = x.detach().to(own)
        brought = self.shared.complete(brought)
        for name in self.shared.overlaps.keys() & brought.keys() & self.values.keys():
            if not same_entries(brought[name], self.values[name]):
                other = self.shared.overlaps[name]
                fact = f"has another value for {name}, which shares its memory with {other}"
                raise PlanError("load_state_dict", fact, LOAD_BEFORE)
        return brought

    def load(self, brought: Mapping[str, torch.Tensor]) -> None:
        """Keep new values; the ranks copy theirs themselves (`copy_buffers`)."""
        copy_buffers(self.values, brought)
        self.loaded |= brought.keys()


@torch.no_grad()
def copy_buffers(into: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> None:
    """Copy values in place, of the names that both mappings have."""
    for name in into.keys() & values.keys():
        into[name].copy_(values[name])
