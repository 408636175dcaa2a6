"""Find the named axes of every tensor, then a type with its reason for every value over every mesh axis
(TRACED -> ANNOTATED).

In: a graph of whole operators. Out: the same graph with `dims`, `layout`, `forms` and `why` in its notes: over the
batch by rule (`samples.py`), over each mesh axis that divides values by its policy (`policies.py`). `ctx.found` gets
the solver's assignments and the operators that are not split as expected.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from torch.fx import Graph, Node

from autoptd.errors import InternalError
from autoptd.ir.layout import BATCH
from autoptd.ir.mesh import base
from autoptd.ir.notes import Fallback, is_tensor, note, output, shape, site
from autoptd.passes.axes.axes import Axes
from autoptd.passes.context import Context
from autoptd.passes.policies import policies
from autoptd.passes.runner import Form, graph_pass
from autoptd.passes.samples import assign_samples
from autoptd.passes.solve.fallbacks import fallbacks


def check_traced(graph: Graph, ctx: Context) -> None:
    """Verify the assumptions of annotate on a TRACED graph; raise InternalError with all findings."""
    findings = [text for node in graph.nodes for text in _untraced(node)]
    loss = output(graph).args[0]
    if not isinstance(loss, Node) or not is_tensor(loss) or math.prod(shape(loss)) != 1:
        findings.append(f"the output {loss} is not a loss")
    if findings:
        raise InternalError("TRACED", "; ".join(findings))


def _untraced(node: Node) -> Iterator[str]:
    """Yield the errors of one node of a TRACED graph."""
    record = note(node)
    depends = record.kind == "param" or any(note(operand).of_params for operand in node.all_input_nodes)
    if node.op != "output" and record.of_params != depends:
        fact = "depends on parameters" if depends else "does not depend on parameters"
        yield f"{site(node)} {fact}, but its note says otherwise"
    if record.needs_grad and not record.of_params:
        yield f"{site(node)} needs a gradient but depends on no parameter"
    if record.layout.types or record.stages:
        yield f"{site(node)} is {record.layout} of stages {record.stages} already"


def check_annotated(graph: Graph, ctx: Context) -> None:
    """Verify the dims and types of an ANNOTATED graph; raise InternalError with all findings."""
    axes = {BATCH, *ctx.found.assignments}
    findings = [text for node in graph.nodes for text in _unannotated(node, axes)]
    for assignment in ctx.found.assignments.values():
        for node, strategy in assignment.strategies.items():
            types = note(node).layout.over(assignment.axis)
            if types != strategy.gives:
                fact = f"is {types} over {assignment.axis}, and was solved as {strategy.gives}"
                findings.append(f"{site(node)} {fact}")
    if findings:
        raise InternalError("ANNOTATED", "; ".join(findings))


def _unannotated(node: Node, axes: set[str]) -> Iterator[str]:
    """Yield the errors in the dims and types of one node."""
    record = note(node)
    if node.op == "output" or not is_tensor(node):
        return
    if record.dims and tuple(map(math.prod, record.dims)) != shape(node):
        yield f"{site(node)} of shape {shape(node)} has dims {record.dims}"
    for axis, kind in record.layout.types:
        if base(axis) not in axes:
            yield f"{site(node)} is {kind} over {axis}, which no policy assigns"
        if kind.kind != "S":
            continue
        # A dim of size 1 has no atoms, but a type may still name its atom 0.
        if kind.dim >= len(record.dims) or kind.atom > max(0, len(record.dims[kind.dim]) - 1):
            yield f"{site(node)} is {kind} over {axis}, and has dims {record.dims}"


@graph_pass(
    takes=Form.TRACED,
    gives=Form.ANNOTATED,
    changes=("rule", "dims", "layout", "forms", "why", "fallback", "rows", "draw"),
    finds=("axes", "assignments", "fallbacks"),
    requires=check_traced,
    ensures=check_annotated,
)
def annotate(graph: Graph, ctx: Context) -> None:
    """Fill the types of every node, over the batch and then over the mesh axes that divide values."""
    # Axes come first: they do not depend on the mesh, and everything below reads them.
    ctx.found.axes, ctx.found.assignments = Axes(graph), {}
    assign_samples(graph, ctx.found.axes, ctx)
    for policy in policies(ctx):
        policy.assign(graph, ctx.found.axes, ctx)
    ctx.found.fallbacks = tuple(_of_a_microbatch(fallback, ctx) for fallback in fallbacks(graph))


def _of_a_microbatch(fallback: Fallback, ctx: Context) -> Fallback:
    """Return the fallback with its FLOPs scaled to a microbatch, since the trace may have more samples."""
    return replace(fallback, flops=fallback.flops * ctx.rows // ctx.traced_rows)


__all__ = ["annotate", "check_annotated", "check_traced"]
