"""Compute the cost of a plan over tp from its graph: seconds, bytes sent and bytes held.

In: a CONNECTED graph. Out: `Weight` (program/weighed.py) for one microbatch and one tensor rank, forward and
backward; the memory of parameters excludes gradients and optimizer state. `weigh_known` compares a plan with
published ones.

    weigh(graph, Sizes(Mesh(t=8), traced_rows=2, rows=1, pieces=8), machine, saved_bytes).sent_bytes
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch.fx import Graph, Node

from autoptd.errors import PlanError
from autoptd.ir.layout import Sizes
from autoptd.ir.machine import Machine
from autoptd.ir.markers import convert
from autoptd.ir.mesh import Mesh
from autoptd.ir.notes import converted_types, local_shape, note, ops, placeholders, shape, tensor
from autoptd.ir.plan import Plan
from autoptd.ir.types import CONVERSIONS, LOCAL_KINDS, wire_bytes
from autoptd.passes.context import Context
from autoptd.passes.kept.requested import gather_again
from autoptd.passes.ops.costs import (
    collective_seconds,
    converted_bytes,
    flops,
    local_payload,
    passes_of,
    rank_seconds,
)
from autoptd.passes.runner import Pass, Record, run_passes
from autoptd.passes.stages.held_bytes import kept_bytes, read_from_outside
from autoptd.program.weighed import Weight, weighed_record


def weigh_known(
    traced: Graph, connected: Graph, ctx: Context, passes: Sequence[Pass]
) -> dict[str, Any] | None:
    """Compare a plan that may split tokens wherever that is cheaper with those of Megatron and Korthikanti et
    al.

    `connected` is the plan; `passes` take a TRACED graph to CONNECTED. Returns None unless sequence_parallel
    is "auto", and for a program that follows another, such as one for evaluation.
    """
    options, machine = ctx.options, ctx.options.rank_machine
    is_held = ctx.like is not None
    if ctx.mesh.value_ranks == 1 or options.sequence_parallel != "auto" or is_held:
        return None
    weights, missing = {"auto": weigh(connected, ctx.sizes, machine, kept_bytes(connected, ctx))}, {}
    for sequence_parallel in (True, False):
        # Drop the user's pins, as Megatron's plan has none.
        known = replace(ctx, options=replace(options, sequence_parallel=sequence_parallel, plan=Plan()))
        try:
            graph = run_passes(passes, traced, known, Record(dump=False))
        # For example, t may not divide the tokens: report that this plan is missing, and why.
        except PlanError as error:
            missing[str(sequence_parallel)] = error.fact
        else:
            weights[str(sequence_parallel)] = weigh(graph, ctx.sizes, machine, kept_bytes(graph, known))
    return weighed_record(weights, missing)


def weigh(graph: Graph, sizes: Sizes, machine: Machine, saved_bytes: float) -> Weight:
    """Return the cost of the plan on `machine`, per microbatch and tensor rank, with `saved_bytes` saved."""
    # The trace may have more samples than a microbatch.
    mesh, share = sizes.mesh, sizes.rows / sizes.traced_rows
    seconds = sum(_seconds(node, mesh, machine) for node in ops(graph))
    calls: list[tuple[str, float, int]] = []
    for node in ops(graph):
        if node.target is convert:
            source, target = converted_types(node)
            row, degree = CONVERSIONS[source.kind, target.kind], mesh.degree(note(node).axis)
            nbytes = converted_bytes(node, mesh)
            kinds = [row.forward, row.backward if note(node).needs_grad else "none"]
            # Backward has one more collective, the price of not saving the gathered value.
            if gather_again(node):
                kinds.append("all-gather")
                seconds += collective_seconds("all-gather", nbytes, degree, machine)
            calls += [(kind, nbytes, degree) for kind in kinds if kind not in LOCAL_KINDS]
    params = list(placeholders(graph, "param"))
    held = [(math.prod(local_shape(param, sizes)), tensor(param).element_size()) for param in params]
    return Weight(
        seconds=seconds * share,
        sent_bytes=round(sum(wire_bytes(*call) for call in calls) * share),
        collectives=len(calls),
        parameters=sum(count for count, _ in held),
        parameter_bytes=sum(count * itemsize for count, itemsize in held),
        least_parameters=sum(math.prod(shape(param)) for param in params) // mesh.value_ranks,
        saved_bytes=round(saved_bytes),
    )


def _seconds(node: Node, mesh: Mesh, machine: Machine) -> float:
    """Return the seconds of an operator, forward and backward; values inside a fused operator are not moved."""
    record = note(node)
    if record.fused.is_inner and not flops(node):
        return 0.0
    if record.fused.what.startswith("part of") and not flops(node):
        moved = sum(local_payload(value, mesh) for value in [node, *read_from_outside(node)])
        # Moved once in forward, and twice in backward, for values and their gradients.
        return passes_of(node) * moved / machine.memory_bandwidth
    return rank_seconds(node, mesh, machine)


__all__ = ["weigh", "weigh_known"]
