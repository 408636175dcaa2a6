"""New data for every step of `verify`: the user's own batches, or ones made of the example.

In: the example call, and what the program divides. Out: a call for every step, the first of them the example
itself.

    calls = fresh_calls(program, (args, kwargs), steps=5)

From one example others are made that hold nothing but its values: the rows of every tensor move on, the
numbers in tensors of integers (tokens, labels) change places, and the rows of tensors of floats. What looks
like a mask (zeros and ones, or numbers that forbid) only moves on, and ignored labels, which are negative,
stay where they are in their row.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import torch

from autoptd.compat import tree_flatten, tree_unflatten
from autoptd.errors import PlanError
from autoptd.program.program import Program
from autoptd.subject.call import Call, split_call


def fresh_calls(program: Program, call: Call, steps: int) -> list[Call]:
    """Return the example, and as many calls more as there are steps, each with other data.

    The same in every run.
    """
    return [call, *(_mixed(program, call, step) for step in range(1, steps))]


def given_calls(batches: Iterable[Any], steps: int) -> list[Call]:
    """Return the calls of the first `steps` batches; PlanError where there are fewer."""
    calls = [split_call(batch) for batch in itertools.islice(batches, steps)]
    if len(calls) < steps:
        raise PlanError(
            "batches", f"there are {len(calls)} for {steps} steps", f"steps={len(calls)}, or more batches"
        )
    return calls


def _mixed(program: Program, call: Call, step: int) -> Call:
    leaves, tree = tree_flatten(call)
    generator = torch.Generator().manual_seed(step)
    for number in (spec.leaf for spec in program.inputs if spec.batched):
        # Rows move on, so that masks and labels meet other rows as well.
        leaves[number] = _mix(leaves[number].detach().roll(step, 0), generator)
    return tree_unflatten(leaves, tree)  # type: ignore[return-value]


def _mix(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return the same values at other places."""
    if _is_mask(x):
        return x
    if x.is_floating_point() or x.is_complex():
        # Rows stay whole: the numbers in one may belong together.
        return x[torch.randperm(x.shape[0], generator=generator, device="cpu").to(x.device)]
    values = x[x >= 0]
    mixed = values[torch.randperm(values.numel(), generator=generator, device="cpu").to(x.device)]
    return x.masked_scatter(x >= 0, mixed)


def _is_mask(x: torch.Tensor) -> bool:
    """Tell whether these are decisions rather than data: zeros and ones, or numbers that forbid."""
    if x.dtype == torch.bool or bool(((x == 0) | (x == 1)).all()):
        return True
    # -inf, or the -1e4 and finfo.min of additive masks.
    return x.is_floating_point() and bool((~x.isfinite() | (x.abs() >= 1e4)).any())
