"""New data for every step of `verify`: the user's batches, or variations of the example.

In: the example call, and the inputs that the program divides. Out: one call per step, the first of them the
example itself.

    calls = fresh_calls(program, (args, kwargs), steps=5)

Variations contain only the example's values: the rows of every tensor are rolled, the numbers in integer
tensors (tokens, labels) are shuffled, and so are the rows of float tensors. Masks (zeros and ones, or
additive masks) are only rolled, and ignored (negative) labels stay at their place in the row.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import torch

from autoptd.compat import tree_flatten, tree_unflatten
from autoptd.errors import PlanError
from autoptd.program.program import Program
from autoptd.runtime.step.microbatches import check_call
from autoptd.subject.call import Call, split_call


def fresh_calls(program: Program, call: Call, steps: int) -> list[Call]:
    """Return the example and variations of it, `steps` calls in all, the same in every run."""
    return [call, *(_mixed(program, call, step) for step in range(1, steps))]


def given_calls(batches: Iterable[Any], steps: int) -> list[Call]:
    """Return the calls of the first `steps` batches; PlanError if there are fewer."""
    calls = [split_call(batch) for batch in itertools.islice(batches, steps)]
    if len(calls) < steps:
        raise PlanError(
            "batches",
            f"{len(calls)} batches given for {steps} steps",
            f"steps={len(calls)}, or pass more batches",
        )
    return calls


def check_calls(program: Program, calls: Iterable[Call]) -> None:
    """Raise PlanError for a call that a program cannot run."""
    for args, kwargs in calls:
        check_call(program, args, kwargs, program.mesh.replicas)


def _mixed(program: Program, call: Call, step: int) -> Call:
    leaves, tree = tree_flatten(call)
    generator = torch.Generator().manual_seed(step)
    for number in (spec.leaf for spec in program.inputs if spec.batched):
        # Roll the rows, so that masks and labels meet other rows as well.
        leaves[number] = _mix(leaves[number].detach().roll(step, 0), generator)
    return tree_unflatten(leaves, tree)  # type: ignore[return-value]


def _mix(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return the same values at other positions."""
    if _is_mask(x):
        return x
    if x.is_floating_point() or x.is_complex():
        # Rows stay whole: the numbers in one may belong together.
        return x[torch.randperm(x.shape[0], generator=generator, device="cpu").to(x.device)]
    values = x[x >= 0]
    mixed = values[torch.randperm(values.numel(), generator=generator, device="cpu").to(x.device)]
    return x.masked_scatter(x >= 0, mixed)


def _is_mask(x: torch.Tensor) -> bool:
    """Tell whether a tensor is a mask rather than data: zeros and ones, or an additive mask."""
    if x.dtype == torch.bool or bool(((x == 0) | (x == 1)).all()):
        return True
    # -inf, or the -1e4 and finfo.min of additive masks.
    return x.is_floating_point() and bool((~x.isfinite() | (x.abs() >= 1e4)).any())
