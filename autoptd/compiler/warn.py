"""Warn where a program does less than its request suggests: work that ranks repeat, values that are kept, ranks
that wait.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from torch.fx import Graph

from autoptd.compiler.records import merged_fallbacks
from autoptd.errors import PlanError
from autoptd.ir.mesh import AXES, Role
from autoptd.ir.names import any_layer, is_within
from autoptd.ir.notes import note, ops
from autoptd.options import Options
from autoptd.passes.context import Context
from autoptd.passes.solve.assignment import Assignment
from autoptd.program.program import Program

# Share of the FLOPs of matrix products.
WORTH_A_WARNING = 0.01


def warn_of_recompute(graph: Graph, options: Options, checkpointed: Sequence[str]) -> None:
    """Warn about values kept despite a request, by keyword or activation checkpoints, to recompute them."""
    drops = [note(node).module for node in ops(graph) if note(node).keep.dropped]
    # By value: where there is room for everything.
    if options.recompute.what and options.recompute.what != "auto" and not drops:
        why = (
            "fused attention keeps no scores"
            if options.recompute.what == "selective"
            else "nothing is saved there"
        )
        warnings.warn(f"recompute={options.recompute.what!r} drops nothing: {why}", stacklevel=4)
    if options.recompute.what is not None:
        return
    kept = []
    for name in checkpointed:
        if not any(is_within(module, name) for module in drops):
            kept.append(name)
    if kept:
        names = ", ".join(dict.fromkeys(map(any_layer, kept)))
        message = (
            f"activation checkpointing in the model ({names}) is not honored: these activations are kept. Results are "
            "the same, memory is not reduced"
        )
        warnings.warn(message, stacklevel=4)


def warn_of_whole_tokens(ctx: Context) -> None:
    """Warn if sequence_parallel=True splits no value by tokens."""
    if ctx.options.sequence_parallel is not True:
        return
    axes = [axis for axis in ctx.mesh.axes_of(Role.VALUES) if ctx.mesh.degree(axis) > 1]
    if axes and not any(_splits_tokens(ctx.found.assignments[axis]) for axis in axes):
        fact = "all values are so small that a second collective would cost more than it saves"
        warnings.warn(f"sequence_parallel=True changes nothing: {fact}", stacklevel=4)


def _splits_tokens(assignment: Assignment) -> bool:
    """Tell whether a result of any operator is split by tokens over the axis of an assignment."""
    splitter = assignment.splitter
    for node, strategy in assignment.strategies.items():
        for _, kind in strategy.gives.shards:
            if id(splitter.axes.atoms(node, kind.dim)[kind.atom]) in splitter.tokens:
                return True
    return False


def warn_of_mixing(mixed: PlanError, microbatches_before: int, program: Program) -> None:
    """Warn where the ranks of a pipeline wait for each other because one microbatch was chosen."""
    if microbatches_before > program.num_microbatches and program.mesh.pipeline_ranks > 1:
        message = f"{mixed.site}: {mixed.fact}: one microbatch, in which the ranks of the pipeline wait for each other"
        warnings.warn(f"{message} (pass num_microbatches=1 if that is intended)", stacklevel=4)


def warn_of_fallbacks(program: Program) -> None:
    """Warn once if tensor ranks repeat each other's work to more than a hundredth of all FLOPs of matrix
    products.
    """
    repeated = [record for record in merged_fallbacks(program.fallbacks) if record["flops"]]
    share = sum(record["flops"] for record in repeated) / max(1, program.costs.total_flops)
    if share <= WORTH_A_WARNING:
        return
    # Sites with one reason share a clause.
    sites_of: dict[tuple[str, str], list[str]] = {}
    for record in repeated:
        sites_of.setdefault((record["fact"], record["remedy"]), []).append(record["site"] or "the model")
    reasons = []
    for (fact, remedy), sites in sites_of.items():
        reasons.append(f"{', '.join(dict.fromkeys(sites))}: {fact} ({remedy})")
    mesh = program.mesh
    words = [AXES[axis].word for axis in mesh.value_axes if mesh.degree(axis) > 1]
    message = (
        f"{100 * share:.0f}% of the FLOPs of matrix products are done by every {' or '.join(words)} rank in full. "
        f"{'; '.join(reasons)}. See program.fallbacks"
    )
    warnings.warn(message, stacklevel=4)
