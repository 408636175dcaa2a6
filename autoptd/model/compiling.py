"""What a running model asks of its compiler: a program for a call. `compiler/compiler.py` has the one that traces models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from autoptd.options import Options
from autoptd.program.program import Program
from autoptd.subject.call import Call
from autoptd.subject.subject import Subject


class ModelCompiler(Protocol):
    """Compiles one subject."""

    @property
    def subject(self) -> Subject: ...

    @property
    def options(self) -> Options: ...

    def for_training(self, call: Call, replicas: int, check: bool = True) -> Program:
        """Compile for steps with the rows of `replicas` replicas; `check` compares trace and model."""
        ...

    def for_sizes(self, call: Call, first: Program) -> Program:
        """Compile for steps of other sizes, on the ranks of the program that trains."""
        ...

    def for_evaluation(self, call: Call, first: Program, counts: tuple[int, ...] = ()) -> Program:
        """Compile for an evaluation likewise; `counts` are the rows of every replica where they are not equal."""
        ...

    def prove(self, calls: Sequence[Call], what: str, *, evaluates: bool, is_made_up: bool) -> None:
        """Raise PlanError unless the model ignores the padding of a call."""
        ...


__all__ = ["ModelCompiler"]
