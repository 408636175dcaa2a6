"""Hold the model's persistent buffers during training: the state dict entries that are not parameters.

In: the model's state dict, the program, and values loaded later. Out: the program with these buffers, and the
ranks' copies set to the loaded values. The compiler may have specialised on the value of a buffer
(ir/buffers.py): other values are rejected here, or make the caller compile again.

    buffers = ModelBuffers(shared)
    program = buffers.take(program, model.state_dict(), weights=None)
    new = buffers.values_of(state_dict); buffers.load(new)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from autoptd.errors import PlanError
from autoptd.ir.buffers import SharedBuffers, same_entries
from autoptd.program.program import Program
from autoptd.program.sources import Source
from autoptd.runtime.step.launch import RunningRanks

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

    def follow(self, ranks: RunningRanks) -> None:
        """Hold the tensors that the ranks update, of the buffers that a forward updates."""
        for executor in ranks.here[0].executors:
            for first in executor.program.updated:
                for name in self.shared.names_of(first):
                    if name in self.values:
                        self.values[name] = executor.buffers[first]
                        self.updated.add(name)

    def saved(self) -> dict[str, torch.Tensor]:
        """Return the values for a checkpoint, which may be written while the next step updates them."""
        return {name: x.clone() if name in self.updated else x for name, x in self.values.items()}

    def now(self, ranks: RunningRanks) -> dict[str, torch.Tensor]:
        """Return the current values of the model's buffers."""
        return self.shared.complete({**self.values, **ranks.here[0].executor.buffers})

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
                fact = f"brings another value of {name}, which shares its memory with {other}"
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


__all__ = ["LOAD_THEM_BEFORE", "ModelBuffers", "copy_buffers"]
