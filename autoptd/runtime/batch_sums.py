"""Sums over the batch of what depends on inputs only, before the first forward of a step.

In: a stage, and the microbatches of this replica. Out: the counts that weighted means divide by; `stage.sums`, the same on
every rank that computes the stage. Where there are several replicas, that is a collective for the counts, and one for each
round of sums (a round may read those before it).

    set_batch_sums(stage, microbatches, lambda own: group.all_reduce(own, SUMS))
    add_nothing(program, stage_index, group, device)    # of a replica without microbatches
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from autoptd.program.program import Program
from autoptd.runtime.stage import Stage
from autoptd.runtime.world.world import Hops

# The sites of their collectives.
LABELS, SUMS = "count of labels", "sums over the batch"
Inputs = Mapping[str, torch.Tensor]


def chosen_inputs(microbatches: Sequence[Inputs], names: Sequence[str]) -> list[Inputs]:
    """Return those inputs of microbatches that a stage reads."""
    chosen: list[Inputs] = []
    for microbatch in microbatches:
        chosen.append({name: microbatch[name] for name in names})
    return chosen


def count_batch(stage: Stage, microbatches: Sequence[Inputs]) -> torch.Tensor:
    """Return this replica's part of what the losses of a stage divide by: a number for each, in float64."""
    counts = [stage.count(**microbatch) for microbatch in microbatches]
    # One row of counts per microbatch, one column per loss.
    columns = [torch.stack(list(column)) for column in zip(*counts, strict=True)]
    return torch.stack([column.sum().double() for column in columns])


@torch.no_grad()
def set_batch_sums(
    stage: Stage,
    microbatches: Sequence[Inputs],
    reduce: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Set the sums of a stage; `reduce` adds up those of all replicas, a vector of float64."""
    stage.sums = {}
    for method in stage.rounds:
        parts = [method(**microbatch) for microbatch in microbatches]
        total = reduce(torch.stack(list(map(_in_a_row, parts))).sum(0))
        for number, part in parts[0].items():
            stage.sums[number], total = total[: part.numel()].view(part.shape), total[part.numel() :]


def add_nothing(program: Program, stage: int, group: Hops, device: torch.device) -> None:
    """Take part in the sums of a stage for a replica without microbatches, which runs nothing and needs none of them."""
    first_axis = program.mesh.batch_axes[0]
    own = [call for call in program.collectives if (call.stage, call.axis) == (stage, first_axis)]
    for site, what in ((SUMS, "batch sums"), (LABELS, "label count")):
        for call in own:
            if call.conversion == what:
                numbers = call.payload_bytes // torch.float64.itemsize
                group.all_reduce(torch.zeros(numbers, dtype=torch.float64, device=device), site)


def _in_a_row(part: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """Return sums end to end, in float64, in which whole numbers up to 2**53 are exact."""
    return torch.cat([value.reshape(-1).double() for value in part.values()])
