"""What a run does with batches of other lengths or numbers of rows than `example_inputs`: the keyword `shapes`.

In: None, "exact", "bucket" or `Buckets`. Out: the same, checked.

    check_shapes("exact", max_programs=None)
    Buckets((512, 1024, 2048)).fitting(700)             # 1024
"""

from __future__ import annotations

from typing import Any

from autoptd.errors import PlanError

EXACT = "exact"
# Programs of a run, if `max_programs` is not given: each has its graphs and emitted files in memory.
MAX_PROGRAMS = 16


def check_shapes(shapes: Any, max_programs: Any) -> None:
    """Raise PlanError for what says nothing about shapes."""
    if shapes is not None and shapes != EXACT:
        remedy = "None: all batches are like example_inputs; 'exact': a program for every shape that comes"
        raise PlanError(f"shapes={shapes!r}", "no such choice", remedy)
    if max_programs is None:
        return
    if shapes is None:
        fact = "without shapes= there is one program"
        raise PlanError(f"max_programs={max_programs!r}", fact, "leave it out, or shapes='exact'")
    if not isinstance(max_programs, int) or isinstance(max_programs, bool) or max_programs < 1:
        raise PlanError(f"max_programs={max_programs!r}", "not a number of programs", "for example 16")


__all__ = ["EXACT", "MAX_PROGRAMS", "check_shapes"]
