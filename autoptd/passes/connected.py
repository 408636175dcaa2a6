"""Verify the types of a CONNECTED graph against the table of types, regardless of how they were found.

check_connected(graph, axes, "tp", mesh)        # InternalError with all findings
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch.fx import Graph, Node

from autoptd.errors import InternalError
from autoptd.ir import markers
from autoptd.ir.layout import loss_over, shard_places
from autoptd.ir.mesh import Mesh, base
from autoptd.ir.notes import converted_types, note, ops, output, placeholders, site
from autoptd.ir.operators.record import operands
from autoptd.ir.operators.table import linear_groups, rows_read
from autoptd.ir.types import CONVERSIONS, E, I, P, R, S, ValueType, padded_size
from autoptd.passes.axes.axes import Axes, Letter
from autoptd.passes.solve.experts import expert_table
from autoptd.passes.solve.splits import REDUCED_FORMS, Padding


def check_connected(graph: Graph, axes: Axes, axis: str, mesh: Mesh) -> None:
    """Verify that the operand and result types of every operator over an axis are a row of the table.

    Types over sub-axes must match the table over each sub-axis. The degree must divide every split atom,
    except a vocabulary, which is padded. Raises InternalError with all findings.
    """
    # Collect all findings: the first is often a consequence of a later one.
    table = _Table(axis, axes, mesh, graph)
    findings = [text for node in ops(graph) for text in _findings(node, table)]
    findings += [text for node in placeholders(graph, "param") for text in _odd_shards(node, table)]
    loss = output(graph).args[0]
    if isinstance(loss, Node) and (types := note(loss).layout.over(axis)) != loss_over(axis):
        findings.append(f"the loss is {types}, not {loss_over(axis)}")
    if findings:
        raise InternalError("CONNECTED", "; ".join(findings))


@dataclass
class _Table:
    """The rules that the types over one mesh axis must keep."""

    axis: str
    axes: Axes
    mesh: Mesh
    graph: Graph
    paddings: dict[int, Padding] = field(default_factory=dict)

    def padding(self, axis: str) -> Padding:
        """Return what the ranks along the axis, or a sub-axis, may split."""
        degree = self.mesh.degree(axis)
        if degree not in self.paddings:
            self.paddings[degree] = Padding(self.graph, self.axes, degree)
        return self.paddings[degree]

    def parts(self, *nodes: Node) -> tuple[str, ...]:
        """Return the axis, or its sub-axes where the values of all nodes have a type over each of them."""
        every = [part for node in nodes for part in note(node).layout.over(self.axis).sub_axes]
        return self.mesh.parts(self.axis, every)


def _odd_shards(node: Node, table: _Table) -> Iterator[str]:
    """Yield errors for shards of a dim that the degree does not divide and that may not be padded."""
    origin = origin_of(node)
    for axis, kind in note(node).layout.over(table.axis).shards:
        if not table.padding(axis).divides_place(origin, (kind.dim, kind.atom)):
            yield (
                f"{site(node)} is {kind} of {note(node).dims[kind.dim]}, "
                f"which {table.mesh.degree(axis)} ranks do not divide"
            )


def _findings(node: Node, table: _Table) -> Iterator[str]:
    record = note(node)
    yield from _odd_shards(node, table)
    if node.target is markers.convert and base(record.axis) == table.axis:
        yield from _wrong_conversion(node, table)
    if node.target in markers.MARKERS:
        return
    # Sub-axes of different operands must be the same grid: tp:(1)2 of one and tp:(1)4 of another have no
    # common ranks along which "shard" would mean the same.
    parts = table.parts(node, *operands(node))
    if not parts:
        yield f"{site(node)} maps sub-axes of {table.axis} to others"
    for part in parts:
        types = {origin_of(operand): note(operand).layout[part] for operand in operands(node)}
        gives = record.layout[part]
        if not _is_row(node, types, gives, table.axes, table.padding(part)):
            shown = ", ".join(f"{operand.name}: {kind}" for operand, kind in types.items())
            over = f" over {part}" if len(parts) > 1 else ""
            yield f"{site(node)} maps ({shown}) to {gives}{over}, which no rule allows"


def _wrong_conversion(node: Node, table: _Table) -> Iterator[str]:
    """Yield the errors of a conversion.

    It must be a row of the table over its axis, have the right arguments, and change nothing over other axes.
    """
    source, record = operands(node)[0], note(node)
    before, gives = converted_types(node)
    row = CONVERSIONS.get((before.kind, gives.kind))
    wanted = shard_places(record.dims, record.axis, (note(source).layout, record.layout), table.mesh)
    if row is None or row.name != record.conversion:
        yield f"{site(node)} converts {before} to {gives} by {record.conversion}"
    elif node.args[1:] != (row.name, *wanted):
        yield f"{site(node)} converts {before} to {gives} with arguments {node.args[1:]}"
    size = padded_dim(source, before, gives, table.mesh.degree(record.axis))
    if node.kwargs.get("size", 0) != size or (size and row is not None and row.name == "s_to_s"):
        yield f"{site(node)} converts a dim of {size} that is padded with size {node.kwargs.get('size', 0)}"
    for part in table.parts(source, node):
        if part != record.axis and note(source).layout[part] != record.layout[part]:
            yield f"{site(node)} converts over {record.axis}, and changes the type over {part}"


def _is_row(node: Node, types: dict[Node, ValueType], gives: ValueType, axes: Axes, padding: Padding) -> bool:
    """Tell whether operands of these types give this result type, over one axis or sub-axis."""
    # Whole: I gives I, and R gives R where backward is linear.
    is_whole_row = gives == I or (gives == R and axes.is_linear(node))
    if is_whole_row and _rest_is_whole(types, set(), gives):
        return True
    # A linear operator of pending sums gives a pending sum.
    for group in _linear_groups(node):
        is_pending = gives == P and all(types[operand] == P for operand in group)
        if is_pending and _rest_is_whole(types, set(group), R):
            return True
    if gives == E:
        return _is_by_expert(node, types)
    letters = [letter for letter in axes.letters(node) if padding.divides(node, letter)]
    return any(_is_split_by(node, letter, types, gives) for letter in letters)


def _is_by_expert(node: Node, types: dict[Node, ValueType]) -> bool:
    """Tell whether these types fit an operator on the rows of a rank's experts, with matrices or row-wise."""
    table = expert_table(node)
    own = {operand for operand, kind in types.items() if kind == E}
    if table is not None:
        table = origin_of(table)
        is_table = types[table] == S(0, 0) and own <= {operands(node)[0]} - {table}
        return is_table and _rest_is_whole(types, {table, *own}, R)
    return rows_read(node, own) is not None and _rest_is_whole(types, own, R)


def _is_split_by(node: Node, letter: Letter, types: dict[Node, ValueType], gives: ValueType) -> bool:
    """Tell whether these are the types of an operator that is split along a letter.

    Every operand with that letter is sharded in the same order. The result is sharded too, or a pending sum.
    """
    order = next((types[operand].order for operand in letter.places if operand in types), gives.order)
    if any(types.get(operand) != S(*place, order) for operand, place in letter.places.items()):
        return False
    contracted = I if letter.form in REDUCED_FORMS else P
    expected = S(*letter.out, order) if letter.out is not None else contracted
    taken = set(letter.places)
    if letter.out is None and not letter.form:
        # An addend of a pending sum, such as a bias, must be pending too.
        for group in _linear_groups(node):
            if not taken.isdisjoint(group):
                taken |= set(group)
                if any(types[operand] != P for operand in set(group) - letter.places.keys()):
                    return False
    return gives == expected and _rest_is_whole(types, taken, R)


def _rest_is_whole(types: dict[Node, ValueType], taken: set[Node], kind: ValueType) -> bool:
    """Check the operands not in `taken`; one without a gradient may be I wherever R is required."""
    for operand, given in types.items():
        # I and R differ only in the cotangent, which does not exist here.
        is_known = given == kind or (given == I and not note(operand).of_params)
        if operand not in taken and not is_known:
            return False
    return True


def _linear_groups(node: Node) -> list[tuple[Node, ...]]:
    """Return the linear groups with their operands before conversion, as letters have them."""
    groups = []
    for group in linear_groups(node):
        groups.append(tuple(dict.fromkeys(origin_of(operand) for operand in group)))
    return groups


def origin_of(node: Node) -> Node:
    """Return the source value, past conversions, shares, first rows and batch sums."""
    while node.target in (*markers.PLACED, markers.batch_sum):
        node = node.args[0]  # type: ignore[assignment]
    return node


def padded_dim(source: Node, kind: ValueType, target: ValueType, t: int) -> int:
    """Return the size of the dim that a conversion pads or unpads; 0 where t divides it."""
    dims = note(source).dims
    return max(padded_size(dims, kind, t), padded_size(dims, target, t))
