"""The memory of a rank as a bound: by how much a cut exceeds it, and what users are told.

if excess_bytes(cut, ctx):
    raise too_full(max(ctx.needed_bytes(cut)), ctx, "the best cut found")
"""

from __future__ import annotations

from autoptd.errors import PlanError
from autoptd.passes.context import Context
from autoptd.program.costs import Cut

GIB = 1 << 30


class TooFull(PlanError):
    """No cut leaves every rank within its memory: on the fullest, `excess` bytes are too many."""

    excess: float = 0.0


def excess_bytes(cut: Cut, ctx: Context) -> float:
    """Return the bytes by which the fullest rank exceeds its memory."""
    return max(max(ctx.needed_bytes(cut), default=0.0) - ctx.machine.memory, 0.0)


def too_full(needed: float, ctx: Context, which: str) -> TooFull:
    """Make the error for a rank that would hold more than its memory, with what is left to ask for."""
    fact = f"with {which}, the fullest rank takes {_size(needed)} and has {_size(ctx.machine.memory)}"
    parts = "parameters, gradients, AdamW's two moments; activations of the microbatches in flight"
    if ctx.working:
        parts += f"; up to {_size(max(ctx.working))} between operators"
    fact += f" ({parts})"
    options = ctx.options
    left = {
        "sequence_parallel='auto'": ctx.mesh.value_ranks > 1 and not options.sequence_parallel,
        "recompute='auto'": options.recompute.what != "auto",
        "zero=1": ctx.mesh.gradient_ranks > 1 and not options.zero.stage,
    }
    remedies = ["a larger t or p", "smaller microbatches (a larger num_microbatches)"]
    remedies += ["a schedule with fewer of them in flight (1f1b)", *(each for each in left if left[each])]
    error = TooFull("memory", fact, f"{', '.join(remedies)}, or more memory")
    error.excess = max(needed - ctx.machine.memory, 0.0)
    return error


def _size(nbytes: float) -> str:
    for unit, size in (("GiB", GIB), ("MiB", 2**20)):
        if nbytes >= size:
            return f"{nbytes / size:,.2f} {unit}"
    return f"{nbytes:,.0f} bytes"


__all__ = ["TooFull", "excess_bytes", "too_full"]
