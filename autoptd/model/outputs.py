"""What evaluations return besides the loss: how it is asked for, and how it is brought together.

In: `outputs` of `pm.eval_step`. Out: a name, which is the same on all ranks; the tensors, in the form that was asked for.

    names = OutputNames()
    names.name_of("logits")     # "'logits'"
    bring_together(ranks, program, "logits", count, everywhere=False)
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch

from autoptd.errors import PlanError
from autoptd.program.program import Program
from autoptd.runtime.step.launch import Rank, RunningRanks
from autoptd.runtime.step.outputs import SITE, gathered, joined, of_all_replicas
from autoptd.trace.loss import ALONE, ARGUMENT, Outputs

# Each function is compiled.
MAX_FUNCTIONS = 8


class OutputNames:
    """Name the outputs that are asked for; a function keeps its name from call to call."""

    def __init__(self) -> None:
        self._functions: list[Callable[..., Any]] = []

    def name_of(self, outputs: Outputs | None) -> str:
        """Return the name of some outputs; PlanError for one function too many."""
        if outputs is None:
            return ""
        if not callable(outputs):
            names = [outputs] if isinstance(outputs, str) else outputs
            if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
                remedy = "a name, a list of names, or a function of the model's output and the call"
                raise PlanError(ARGUMENT, f"is {outputs!r}", remedy)
            return repr(outputs if isinstance(outputs, str) else list(outputs))
        known = [number for number, one in enumerate(self._functions) if _is_same(one, outputs)]
        if not known:
            if len(self._functions) == MAX_FUNCTIONS:
                fact = f"is another function than the {MAX_FUNCTIONS} before, and each one is compiled"
                remedy = "the same function in every call: a lambda within a loop is another one each time"
                raise PlanError(ARGUMENT, fact, remedy)
            known = [len(self._functions)]
            self._functions.append(outputs)
        return f"function {known[0]}"


def _is_same(one: Callable[..., Any], other: Callable[..., Any]) -> bool:
    """Tell whether two functions are one; a bound method is another object each time it is looked up."""
    if isinstance(one, MethodType) and isinstance(other, MethodType):
        return one.__self__ is other.__self__ and one.__func__ is other.__func__
    return one is other


def bring_together(
    ranks: RunningRanks, program: Program, outputs: Outputs, count: Callable[[Rank], int], everywhere: bool
) -> Any:
    """Return what the last evaluation has kept; `count` returns the microbatches of a rank. Collective.

    `everywhere`: with the rows of all replicas.
    """
    by_replica: dict[int, dict[str, torch.Tensor]] = {}

    def gather(rank: Rank) -> None:
        executor = rank.evaluator
        found = gathered(program, executor.outputs, rank.world, count(rank))
        executor.outputs = {}
        # As threads, they are all here.
        if everywhere and ranks.replicas == 1:
            found = of_all_replicas(program, found, rank.world)
        by_replica[ranks.replica_of(rank)] = found

    ranks.unrecorded.run(SITE, gather)
    found = joined(program, by_replica)
    return found[outputs] if isinstance(outputs, str) else found.get(ALONE, found)


__all__ = ["ARGUMENT", "OutputNames", "bring_together"]
