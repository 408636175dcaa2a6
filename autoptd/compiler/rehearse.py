"""Hold a program to the memory of a rank: what a step needs beside what ranks hold is known once the program is written.

In: a writer, which places and writes a program for a context. Out: the first program whose step fits, rehearsed rank by
rank (`peak_memory.py`). What a rank holds is counted before (parameters with their state, saved activations); at its fullest
moment it also has what is between operators: gradients on their way back, values computed again, messages, logits. Where a
step does not fit, the passes run again, with so many bytes of every rank put aside.

    program, graph, ctx = rehearse(writer, ctx)
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple, Protocol

from torch.fx import Graph

from autoptd.compiler.peak_memory import Peak, peak_memory
from autoptd.passes import Context
from autoptd.passes.stages.memory_bound import TooFull, too_full
from autoptd.program.program import Program

# The bytes between operators change with the plan: how often they are put aside anew.
MAX_REHEARSALS = 5
# Without `memory=`, a rank that holds less of its memory than this is not rehearsed: that takes as long as some passes.
SAFE_SHARE = 0.75


class Written(NamedTuple):
    """A program, its graph, and the context with the options that were chosen for it."""

    program: Program
    graph: Graph
    ctx: Context


class Writes(Protocol):
    """Places and writes a program: `driver.Writer`."""

    def write(self, ctx: Context) -> Written | TooFull: ...


def rehearse(writer: Writes, ctx: Context) -> Written | TooFull:
    """Return a program whose step fits on every rank; TooFull where none was found."""
    refused: TooFull | None = None
    for _ in range(MAX_REHEARSALS):
        written = writer.write(ctx)
        if isinstance(written, TooFull):
            # What was put aside is what a plan takes that holds more: one that holds less may take less.
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
    """Note the fullest moments in a program's costs, and in the plan what the fullest rank takes."""
    nbytes = tuple(float(peak.nbytes) for peak in peaks)
    plan = program.plan
    if "relief" in plan:
        plan = {**plan, "relief": {**plan["relief"], "peak_bytes": max(nbytes)}}
    cut = replace(program.costs.cut, peak_bytes=nbytes)
    return replace(program, plan=plan, costs=replace(program.costs, cut=cut))


__all__ = ["Written", "rehearse"]
