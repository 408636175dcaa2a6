"""Compute what depends on the whole batch, once per step: counts and sums before the first forward, then the loss and buffers.

In: the stages of a rank, and the microbatches of its replica. Out: what each rank needs of the whole batch, equal on all
ranks that compute it:

- the counts that weighted means divide by, and `stage.sums`: sums over the batch, and largest entries, of values that
  depend on inputs only. With several replicas that is a collective for the counts, and one for the sums of each round and
  one for its largest entries (a round may read those before it);
- the loss;
- the new values of buffers: those of one device that runs the whole batch in one call.

    set_batch_sums(stage, microbatches, lambda own, op: group.all_reduce(own, SUMS, op))
    add_nothing(program, stage_index, group, device)        # for a replica without microbatches
    loss = sum_loss(world, own)
    load_updates(program, filename)(program, buffers, device).run(stages, world)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from autoptd.program.program import Program
from autoptd.runtime.params.namespace import make_namespace
from autoptd.runtime.step.stage import Largest, Stage, execute
from autoptd.runtime.world.world import Hops, World

# The sites of the collectives.
LABELS, SUMS, BUFFERS = "count of labels", "sums over the batch", "buffer updates"
# The emitted file of buffer updates.
UPDATES = "updates.py"
Inputs = Mapping[str, torch.Tensor]
# How the parts of microbatches are combined, by the operation that combines those of replicas.
COMBINE: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {"sum": torch.sum, "max": torch.amax}


# The call that a replica without microbatches makes, and its number, by the name of the call in the program.
NOTHING = {
    "batch sums": (SUMS, "sum", 0.0),
    "batch maxima": (SUMS, "max", -math.inf),
    "label count": (LABELS, "sum", 0.0),
}


def value_of(part: torch.Tensor | Largest) -> torch.Tensor:
    """Return the tensor of a part."""
    return part.value if isinstance(part, Largest) else part


def chosen_inputs(microbatches: Sequence[Inputs], names: Sequence[str]) -> list[Inputs]:
    """Return the inputs called `names` of every microbatch."""
    chosen: list[Inputs] = []
    for microbatch in microbatches:
        chosen.append({name: microbatch[name] for name in names})
    return chosen


def count_batch(stage: Stage, microbatches: Sequence[Inputs]) -> torch.Tensor:
    """Return this replica's part of the counts that a stage's losses divide by, one number for each (float64)."""
    counts = [stage.count(**microbatch) for microbatch in microbatches]
    # One row of counts per microbatch, one column per loss.
    columns = [torch.stack(list(column)) for column in zip(*counts, strict=True)]
    return torch.stack([column.sum().double() for column in columns])


@torch.no_grad()
def set_batch_sums(
    stage: Stage,
    microbatches: Sequence[Inputs],
    reduce: Callable[[torch.Tensor, str], torch.Tensor],
) -> None:
    """Set the sums of a stage; `reduce` combines a float64 vector over all replicas, by "sum" or "max"."""
    stage.sums = {}
    for method in stage.rounds:
        parts = [method(**microbatch) for microbatch in microbatches]
        for op, combine in COMBINE.items():
            own = {
                n: value_of(part)
                for n, part in parts[0].items()
                if isinstance(part, Largest) == (op == "max")
            }
            if not own:
                continue
            rows = [_in_a_row(part, own) for part in parts]
            total = combine(torch.stack(rows), 0)
            total = reduce(total, op) if op == "sum" else _largest(total, reduce)
            for number, value in own.items():
                stage.sums[number], total = total[: value.numel()].view(value.shape), total[value.numel() :]


def _largest(own: torch.Tensor, reduce: Callable[[torch.Tensor, str], torch.Tensor]) -> torch.Tensor:
    """Return the maximum over all replicas; NaNs are sent separately, since gloo and NCCL may drop them."""
    is_nan = own.isnan()
    both = torch.cat([own.masked_fill(is_nan, -math.inf), is_nan.double()])
    largest, is_nan = reduce(both, "max").chunk(2)
    return largest.masked_fill(is_nan > 0, math.nan)


def add_nothing(program: Program, stage: int, group: Hops, device: torch.device) -> None:
    """Take part in the sums of a stage on a replica without microbatches, which needs none of them."""
    first_axis = program.mesh.batch_axes[0]
    own = [call for call in program.collectives if (call.stage, call.axis) == (stage, first_axis)]
    # In the order of the other ranks: by round.
    for call in sorted(own, key=lambda call: call.conversion == "label count"):
        if call.conversion in NOTHING:
            site, op, nothing = NOTHING[call.conversion]
            numbers = call.payload_bytes // torch.float64.itemsize
            group.all_reduce(torch.full((numbers,), nothing, dtype=torch.float64, device=device), site, op)


def _in_a_row(part: Mapping[int, torch.Tensor | Largest], numbers: Collection[int]) -> torch.Tensor:
    """Concatenate some sums of a part in float64, which holds integers up to 2**53 exactly."""
    return torch.cat([value_of(part[number]).reshape(-1).double() for number in numbers])


class BufferUpdates:
    """Compute the new values of buffers: the base class of the emitted `updates.py`."""

    def __init__(self, program: Program, buffers: Mapping[str, torch.Tensor], device: torch.device) -> None:
        self.buffers = make_namespace(buffers)
        self.device = device
        self._written = {name: buffers[name] for name in program.updated}
        self._specs = program.update_parts
        # In an evaluation, some replicas may have no rows: the first with rows provides the values equal on all.
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
        total = world.hops((*mesh.batch_axes, *mesh.stage_axes)).all_reduce(torch.cat(own), BUFFERS)
        return list(total.split(sizes))


def load_updates(program: Program, filename: str) -> type[BufferUpdates]:
    """Return the class that a program's `updates.py` defines; `filename` is what tracebacks call it."""
    _, found = execute(program.sources[UPDATES], filename, BufferUpdates)
    return found


def sum_loss(world: World, own: torch.Tensor) -> torch.Tensor:
    """Return the sum of `own` (0-d, float64) over all ranks that compute a part of the loss; a collective.

    The ranks' flags (`runtime/world/flags.py`) are sent with it, and need an extra round only over tp.
    """
    mesh, flags = world.mesh, world.flags
    sent = own if flags is None else torch.stack([own, flags.mine()])
    # Not over the other axes: tensor ranks compute the same loss.
    total = world.hops(mesh.loss_axes).all_reduce(sent, "loss")
    if flags is not None:
        total, flag_sum = total.unbind()
        others = tuple(axis for axis in mesh.axes if axis not in mesh.loss_axes)
        flags.look(world.hops(others).all_reduce(flag_sum, "loss"))
    return total
