"""Sums over the batch of what depends on inputs only, before the first forward of a step.

In: a stage, and the microbatches of this replica. Out: the counts that weighted means divide by; `stage.sums`, the same on
every rank that computes the stage. Where there are several replicas, that is a collective for the counts, and one for each
round of sums (a round may read those before it).

    set_batch_sums(stage, microbatches, lambda own: group.all_reduce(own, SUMS))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from autoptd.runtime.stage import Stage

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


def _in_a_row(part: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """Return sums end to end, in float64, in which whole numbers up to 2**53 are exact."""
    return torch.cat([value.reshape(-1).double() for value in part.values()])
