"""Insert a conversion on every edge whose producer and reader disagree on type (ANNOTATED -> CONNECTED).

In: a graph with types over every axis, and the solver's assignments. Out: the graph with a `markers.convert`
per conversion.

A conversion from P, or to the type at which repeated layers begin, is inserted directly after its producer;
all others go directly before their first reader. Readers of the same type share a conversion.
The checks then verify every operator against the table of types (`connected.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

from torch.fx import Graph, Node

from autoptd.errors import InternalError
from autoptd.ir import markers
from autoptd.ir.layout import Layout, Step, shard_places, steps, typed_over
from autoptd.ir.mesh import Mesh, base
from autoptd.ir.notes import Note, note, ops, set_note, site
from autoptd.ir.types import CONVERSIONS, P
from autoptd.passes.connected import check_connected, padded_dim
from autoptd.passes.context import Context
from autoptd.passes.conversion_reasons import Reasons
from autoptd.passes.runner import CALLS, Form, graph_pass
from autoptd.passes.solve.assignment import Assignment
from autoptd.passes.solve.tokens import TokenSplitter


def check_axes(graph: Graph, ctx: Context) -> None:
    """Verify the graph against the table of types, once for every axis that was solved."""
    for axis in ctx.found.assignments:
        check_connected(graph, ctx.found.axes, axis, ctx.mesh)


def check_over_batch(graph: Graph, ctx: Context) -> None:
    """Verify that nodes inserted over the batch keep the types of their source over all solved axes."""
    findings = []
    for node in ops(graph):
        is_inserted = node.target in (*markers.PLACED, markers.batch_sum)
        if not is_inserted or base(note(node).axis) in ctx.found.assignments:
            continue
        source, gives = note(node.args[0]).layout, note(node).layout  # type: ignore[arg-type]
        for axis in ctx.found.assignments:
            if source.over(axis) != gives.over(axis):
                fact = f"is {gives.over(axis)} over {axis}, made of {source.over(axis)}"
                findings.append(f"{site(node)} {fact}")
    if findings:
        raise InternalError("CONNECTED", "; ".join(findings))


def check_tokens(graph: Graph, ctx: Context) -> None:
    """Verify the graph against the table of types over every axis, with the conversions over the others."""
    check_axes(graph, ctx)
    findings: list[str] = []
    for axis in ctx.mesh.token_axes:
        splitter = ctx.found.assignments[axis].splitter
        for node in ops(graph):
            findings += _changed(node, axis)
            if node.target is markers.convert and isinstance(splitter, TokenSplitter):
                findings += _outer_parts(node, splitter)
    if findings:
        raise InternalError("CONNECTED", "; ".join(findings))


def _changed(node: Node, axis: str) -> Iterator[str]:
    """Yield the errors of conversions over other axes that change the type over `axis`."""
    if node.target in markers.PLACED and note(node).axis != axis:
        before, after = (note(value).layout[axis] for value in (node.args[0], node))  # type: ignore[arg-type]
        if before != after:
            yield f"{site(node)} converts over {note(node).axis}, and changes {before} to {after} over {axis}"


def _outer_parts(node: Node, splitter: TokenSplitter) -> Iterator[str]:
    """Yield the errors of conversions that move the outer part of an atom whose inner part another axis has."""
    own = base(note(node).axis)
    for layout in (note(node.args[0]).layout, note(node).layout):  # type: ignore[arg-type]
        for axis, kind in layout.shards:
            place = kind.dim, kind.atom
            others = [base(other) for other, same in layout.shards if (same.dim, same.atom) == place]
            others = [other for other in others if other != own]
            if base(axis) == own and others and own != splitter.inner_of(node, kind):
                yield f"{site(node)} converts over {own} a dim that is cut over {', '.join(others)} within"


@graph_pass(takes=Form.ANNOTATED, gives=Form.CONNECTED, changes=(CALLS,), ensures=check_axes)
def communicate(graph: Graph, ctx: Context) -> None:
    """Insert conversions over every axis."""
    # Axes can be handled one by one: a conversion over one axis does not change the types over the others.
    for assignment in ctx.found.assignments.values():
        meet_readers(graph, assignment, ctx.mesh)


def meet_readers(graph: Graph, assignment: Assignment, mesh: Mesh) -> None:
    """Convert the operands of every reader to the types that it needs over the axis of the assignment."""
    axis, reasons = assignment.axis, Reasons(assignment)
    order = {node: i for i, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        wanted: dict[Layout, list[Node]] = {}
        for reader in sorted(node.users, key=order.__getitem__):
            wanted.setdefault(assignment.needs(reader, node), []).append(reader)
        # {type: the node that holds this value in it}, starting with the value itself.
        by_type: dict[Layout, Node] = {note(node).layout.over(axis): node}
        for target, readers in wanted.items():
            converted = node
            for types in _missing(assignment.route(node, target), by_type):
                # Readers are in graph order, so the conversion is inserted before the first of them.
                if types not in by_type:
                    behind = _behind(node, converted, types, assignment)
                    by_type[types] = convert_before(
                        graph, converted, axis, types, readers[0], mesh, reasons, behind
                    )
                converted = by_type[types]
            if converted is not node:
                for reader in readers:
                    reader.replace_input_with(node, converted)


def _missing(route: Sequence[Layout], by_type: Collection[Layout]) -> Sequence[Layout]:
    """Return the end of a route, from the last type that the value already has: earlier steps would be dead."""
    known = [i for i, types in enumerate(route) if types in by_type]
    return route[known[-1] :] if known else route


def _behind(node: Node, source: Node, types: Layout, assignment: Assignment) -> Node | None:
    """Return the operator whose module gets a conversion directly after `source`; None to insert it before
    its reader.

    A pending sum that repeated layers begin with is converted like the sums between the layers: as part of a
    layer.
    """
    if source is node and types == assignment.entries.get(node) and node.op == "call_function":
        return node
    axis = assignment.axis
    is_pending = note(source).layout.over(axis) == Layout({axis: P})
    return assignment.enters.get(node, source) if is_pending else None


def convert_before(
    graph: Graph,
    source: Node,
    axis: str,
    types: Layout,
    reader: Node,
    mesh: Mesh,
    why: Callable[[Node, Step, Node], str],
    behind: Node | None = None,
) -> Node:
    """Insert the conversions of `source` to another type over an axis; return the last one.

    They go before `reader` or, where an operator is given in its place, directly after `source` in that
    operator's module.
    """
    own = note(source).layout.over(axis)
    path = steps(axis, own, types, mesh)
    if path is None:
        raise InternalError(site(source), f"there is no conversion from {own} to {types}")
    converted = source
    for step in path:
        # After an input or a parameter, the conversion belongs to the module of its reader.
        near = note(behind if behind is not None and note(source).kind == "op" else reader)
        # Each of several steps goes after the one before.
        with graph.inserting_after(converted) if behind is not None else graph.inserting_before(reader):
            converted = _insert(graph, converted, axis, step, mesh, near)
        note(converted).why = why(source, step, reader)
    return converted


def _insert(graph: Graph, source: Node, axis: str, step: Step, mesh: Mesh, near: Note) -> Node:
    """Insert the node of one conversion over an axis or sub-axis, in the module of `near`."""
    record, row = note(source), CONVERSIONS[step.before.kind, step.after.kind]
    layout = record.layout.replacing(axis, step.layout)
    size = padded_dim(source, step.before, step.after, mesh.degree(step.axis))
    # Where shards lie in memory depends on what the other axes cut off before: see `Layout.blocks`.
    args = (source, row.name, *shard_places(record.dims, step.axis, (record.layout, layout), mesh))
    converted = graph.call_function(markers.convert, args, {"size": size} if size else {})
    converted.meta["val"] = source.meta["val"]
    set_note(converted, note_of(record, near, layout))
    note(converted).conversion, note(converted).axis = row.name, step.axis
    return converted


def place_again(graph: Graph, mesh: Mesh) -> None:
    """Correct the positions of every conversion's shards, which depend on both axes."""
    for node in ops(graph):
        if node.target is markers.convert:
            source, name = node.args[:2]
            layouts = (note(source).layout, note(node).layout)  # type: ignore[arg-type]
            axis = typed_over(note(node).axis)
            node.args = (source, name, *shard_places(note(node).dims, axis, layouts, mesh))


def note_of(value: Note, near: Note, layout: Layout) -> Note:
    """Return the note of a value in another layout, computed in the module of `near`."""
    return Note(
        module=near.module,
        source=near.source,
        of_params=value.of_params,
        needs_grad=value.needs_grad,
        dims=value.dims,
        layout=layout,
    )
