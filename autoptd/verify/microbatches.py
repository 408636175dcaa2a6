"""The loss of the unmodified model where part of it is meant per microbatch (`autoptd.per_microbatch`).

In: the model, and the program that divides its batch. Out: the loss on one device. The model runs on the rows
of every microbatch to collect the marked values, then on the whole batch with their means in place. Without
marks it runs once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autoptd.compat import tree_flatten, tree_unflatten
from autoptd.errors import PlanError
from autoptd.ir.notes import op_name, ops
from autoptd.passes import MARK
from autoptd.per_microbatch import marking
from autoptd.program.program import Program
from autoptd.runtime.step.microbatches import part_of_rows

Tensor = torch.Tensor
Loss = Callable[..., Tensor]


def loss_by_microbatch(loss: Loss, program: Program, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the loss of a global batch."""
    if not any(op_name(node) == MARK for node in ops(program.graphs["TRACED"])):
        return loss(*args, **kwargs)
    if program.dropouts:
        fact = "values marked by per_microbatch are computed again per row, with other dropout masks"
        raise PlanError("verify", fact, "set dropout to p=0")
    pieces = program.num_microbatches * program.mesh.replicas
    rounds = [_marked(loss, program, args, kwargs, number, pieces) for number in range(pieces)]
    means = [torch.stack(values).mean(0) for values in zip(*rounds, strict=True)]
    left = iter(means)
    with marking(lambda x: next(left)):
        return loss(*args, **kwargs)


def _marked(
    loss: Loss, program: Program, args: tuple[Any, ...], kwargs: dict[str, Any], number: int, pieces: int
) -> list[Tensor]:
    """Return the marked values in the loss of one microbatch, in order."""
    leaves, tree = tree_flatten((args, kwargs))
    for spec in program.inputs:
        if spec.batched:
            leaves[spec.leaf] = part_of_rows(leaves[spec.leaf], number, pieces, spec.blocks)
    part, keywords = tree_unflatten(leaves, tree)
    values: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        values.append(x)
        return x

    with marking(keep):
        loss(*part, **keywords)
    return values


__all__ = ["loss_by_microbatch"]
