"""Sums over the batch, and largest entries of it, of what depends on inputs only, before the first forward of a step.

In: a stage, and the microbatches of this replica. Out: the counts that weighted means divide by; `stage.sums`, the same on
every rank that computes the stage. Where there are several replicas, that is a collective for the counts, and one for the sums
of each round and for its largest entries (a round may read those before it).

    set_batch_sums(stage, microbatches, lambda own, op: group.all_reduce(own, SUMS, op))
    add_nothing(program, stage_index, group, device)    # of a replica without microbatches
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from autoptd.program.program import Program
from autoptd.runtime.step.stage import Largest, Stage
from autoptd.runtime.world.world import Hops

# The sites of their collectives.
LABELS, SUMS = "count of labels", "sums over the batch"
Inputs = Mapping[str, torch.Tensor]
# How the parts of microbatches become one, by what replicas do with theirs.
COMBINE: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {"sum": torch.sum, "max": torch.amax}


# What a replica without microbatches calls, and with which number, by what the program has of the call.
NOTHING = {
    "batch sums": (SUMS, "sum", 0.0),
    "batch maxima": (SUMS, "max", -math.inf),
    "label count": (LABELS, "sum", 0.0),
}


def value_of(part: torch.Tensor | Largest) -> torch.Tensor:
    """Return the entries of a part."""
    return part.value if isinstance(part, Largest) else part


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
    reduce: Callable[[torch.Tensor, str], torch.Tensor],
) -> None:
    """Set the sums of a stage; `reduce` takes those of all replicas together, a vector of float64, by "sum" or "max"."""
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
    """Take part in the sums of a stage for a replica without microbatches, which runs nothing and needs none of them."""
    first_axis = program.mesh.batch_axes[0]
    own = [call for call in program.collectives if (call.stage, call.axis) == (stage, first_axis)]
    # In the order in which the other ranks make them: by round.
    for call in sorted(own, key=lambda call: call.conversion == "label count"):
        if call.conversion in NOTHING:
            site, op, nothing = NOTHING[call.conversion]
            numbers = call.payload_bytes // torch.float64.itemsize
            group.all_reduce(torch.full((numbers,), nothing, dtype=torch.float64, device=device), site, op)


def _in_a_row(part: Mapping[int, torch.Tensor | Largest], numbers: Collection[int]) -> torch.Tensor:
    """Return some sums of a part end to end, in float64, in which whole numbers up to 2**53 are exact."""
    return torch.cat([value_of(part[number]).reshape(-1).double() for number in numbers])
