"""Update buffers once per step from the parts of its microbatches: the base class of the emitted
`updates.py`.

In: the parts that the stages of a rank kept (`Stage.keep_part`), and the buffers of this rank. Out: the new
values, equal on every rank: those of one device that runs the whole batch in one call.

    updates = load_updates(program, filename)(buffers, device)
    updates.take(parts, world)
    updates.write()
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from autoptd.program.program import Program
from autoptd.runtime.params.namespace import make_namespace
from autoptd.runtime.step.emitted import execute
from autoptd.runtime.step.stage import Stage
from autoptd.runtime.world.world import World

# The emitted file, and the site of the collective.
UPDATES, SITE = "updates.py", "buffer updates"


class BufferUpdates:
    """Compute the new values of buffers; emitted for a program whose forward updates some."""

    def __init__(self, program: Program, buffers: Mapping[str, torch.Tensor], device: torch.device) -> None:
        self.buffers = make_namespace(buffers)
        self.device = device
        self._written = {name: buffers[name] for name in program.updated}
        self._specs = program.update_parts
        # Of an evaluation, some replicas may have no rows, and know nothing of what all of them have alike.
        self._teller = next((i for i, rows in enumerate(program.row_counts) if rows), 0)
        self._total: Sequence[torch.Tensor] = ()

    def new_values(self) -> dict[str, torch.Tensor]:
        """Return the new values by name; emitted."""
        raise NotImplementedError

    def part(self, number: int, *, dtype: torch.dtype, shape: Sequence[int] = ()) -> torch.Tensor:
        """Return the combined parts of the microbatches, in the dtype and shape of the model."""
        return self._total[number].to(dtype).view(shape)

    @torch.no_grad()
    def run(self, stages: Sequence[Stage], world: World) -> None:
        """Add up the parts of all ranks, and write the new values; a collective where there are parts."""
        if self._specs:
            self._total = self._summed(stages, world)
        new = self.new_values()
        # Write after computing all: one buffer may depend on another.
        values = {name: value.clone() for name, value in new.items()}
        for name, value in values.items():
            self._written[name].copy_(value)
        self._total = ()

    def _summed(self, stages: Sequence[Stage], world: World) -> list[torch.Tensor]:
        """Return the sum of every part over replicas and stages: only the stage of the loss has any."""
        own: list[torch.Tensor] = []
        sizes = []
        for number, spec in enumerate(self._specs):
            kept = [stage.parts[number] for stage in stages if number in stage.parts]
            sizes.append(torch.Size(spec.shape).numel())
            # Replicas have equal values: take one.
            if not kept or (not spec.is_sum and world.replica != self._teller):
                kept = [torch.zeros(sizes[-1], dtype=torch.float64, device=self.device)]
            own.append(kept[0].reshape(-1))
        mesh = world.mesh
        total = world.hops((*mesh.batch_axes, *mesh.stage_axes)).all_reduce(torch.cat(own), SITE)
        return list(total.split(sizes))


def load_updates(program: Program, filename: str) -> type[BufferUpdates]:
    """Return the class that a program's `updates.py` defines; `filename` is what tracebacks call it."""
    _, found = execute(program.sources[UPDATES], filename, BufferUpdates)
    return found


__all__ = ["SITE", "UPDATES", "BufferUpdates", "load_updates"]
