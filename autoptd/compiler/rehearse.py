"""Check a program against the memory of a rank, by the working bytes that are known once it is written.

In: a writer, which places and writes a program for a context. Out: the first program whose step fits,
rehearsed rank by rank (`peak_memory.py`). The bytes that a rank holds are counted earlier (parameters with
their state, saved activations); at its peak it also needs working bytes: gradients in flight, recomputed
values, messages, logits. If a step does not fit, the passes run again, with these bytes reserved on every
rank.

    program, graph, ctx = rehearse(writer, ctx)
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple, Protocol

from torch.fx import Graph

from autoptd.compiler.peak_memory import Peak, peak_memory
from autoptd.passes import Context
from autoptd.passes.stages.held_bytes import TooFull, too_full
from autoptd.program.program import Program

# The number of times that working bytes are reserved again, as they change with the plan.
MAX_REHEARSALS = 5
# Without `memory=`, a rank that holds less of its memory than this is not rehearsed, to save compile time.
SAFE_SHARE = 0.75


class Written(NamedTuple):
    """A program, its graph, and the context with the chosen options."""

    program: Program
    graph: Graph
    ctx: Context


class Writes(Protocol):
    """Place and write a program: `driver.Writer`."""

    def write(self, ctx: Context) -> Written | TooFull: ...


def rehearse(writer: Writes, ctx: Context) -> Written | TooFull:
    """Return a program whose step fits on every rank; TooFull if none was found."""
    refused: TooFull | None = None
    for _ in range(MAX_REHEARSALS):
        written = writer.write(ctx)
        if isinstance(written, TooFull):
            # The reserved bytes are those of a plan that holds more: one that holds less may need fewer.
            if not any(ctx.working):
                return written
            refused, ctx = refused or written, ctx.with_less_working(written.excess)
            continue
        if not _may_be_full(written):
            return written
        peaks = peak_memory(written.program)
        written = written._replace(program=_with_peaks(written.program, peaks))
        cut = written.program.costs.cut
        if max(cut.peak_bytes) <= ctx.machine.memory:
            return written
        closest, ctx = written.ctx, ctx.with_working(cut.working_bytes)
    return refused or too_full(max(cut.peak_bytes), closest, "the plan that came closest")


def _may_be_full(written: Written) -> bool:
    memory = written.ctx.machine.memory
    is_bound = written.ctx.options.memory is not None
    fullest = max(written.program.costs.cut.rank_bytes, default=0.0)
    return math.isfinite(memory) and (is_bound or fullest > SAFE_SHARE * memory)


def _with_peaks(program: Program, peaks: tuple[Peak, ...]) -> Program:
    """Record the peaks in a program's costs, and the largest of them in the plan."""
    nbytes = tuple(float(peak.nbytes) for peak in peaks)
    plan = program.plan
    if "relief" in plan:
        plan = {**plan, "relief": {**plan["relief"], "peak_bytes": max(nbytes)}}
    cut = replace(program.costs.cut, peak_bytes=nbytes)
    return replace(program, plan=plan, costs=replace(program.costs, cut=cut))


__all__ = ["Written", "rehearse"]
