"""Insert a conversion on every edge whose producer and reader disagree on type (ANNOTATED -> CONNECTED).

A conversion out of P, and one to the type in which repeated layers begin, is placed right behind its producer, all others right
before their first reader, and two readers that want the same type share one. `check_connected` then holds every operator
against the table of types, independently of how the assignment was found.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch.fx import Graph, Node

from autoptd.errors import InternalError
from autoptd.ir import markers
from autoptd.ir.layout import BATCH
from autoptd.ir.mesh import Mesh
from autoptd.ir.notes import Note, note, op_name, ops, output, placeholders, set_note, site
from autoptd.ir.operators.record import operands
from autoptd.ir.operators.table import linear_groups
from autoptd.ir.types import CONVERSIONS, Conversion, I, P, R, S, ValueType, outer_size, padded_size
from autoptd.passes.axes.axes import Axes, Place
from autoptd.passes.axes.padding import Padding
from autoptd.passes.context import Context
from autoptd.passes.runner import CALLS, Form, graph_pass
from autoptd.passes.solve.assign import Assignment
from autoptd.passes.solve.batch import FIRST_ROWS, adds_number
from autoptd.passes.solve.sharing import Sharing
from autoptd.passes.solve.strategies import NO_COLLECTIVE_FORMS


def check_axes(graph: Graph, ctx: Context) -> None:
    """Hold the graph against the table of types, once for every axis that was solved."""
    for axis in ctx.found.assignments:
        check_connected(graph, ctx.found.axes, axis, ctx.mesh.degree(axis))


@graph_pass(takes=Form.ANNOTATED, gives=Form.CONNECTED, changes=(CALLS,), ensures=check_axes)
def communicate(graph: Graph, ctx: Context) -> None:
    """Insert conversions over every axis, and shares of whole addends in sums over the batch."""
    for assignment in ctx.found.assignments.values():
        _convert(graph, assignment, ctx.mesh)
    _divide_addends(graph, ctx.pieces)


def _convert(graph: Graph, assignment: Assignment, mesh: Mesh) -> None:
    """Insert conversions over the axis of the assignment."""
    axis = assignment.axis
    order = {node: i for i, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        wanted: dict[ValueType, list[Node]] = {}
        for reader in sorted(node.users, key=order.__getitem__):
            wanted.setdefault(assignment.needs(reader, node), []).append(reader)
        made: dict[ValueType, Node] = {note(node).layout[axis]: node}
        for target, readers in wanted.items():
            found = node
            for kind in assignment.route(node, target):
                if kind not in made:
                    made[kind] = _insert(
                        graph, found, axis, kind, readers[0], mesh, _behind(node, found, kind, assignment)
                    )
                found = made[kind]
            for reader in readers if found is not node else ():
                reader.replace_input_with(node, found)


def _divide_addends(graph: Graph, pieces: int) -> None:
    """Give every piece of the batch its share of addends of sums over the batch, and its rows of constants."""
    for node in list(ops(graph)):
        if note(node).layout.batch == P and adds_number(node):
            _share_number(node, pieces)
        elif note(node).layout.batch == P:
            _share_addends(graph, node, pieces)
        for operand, place in note(node).extra.get(FIRST_ROWS, {}).items():
            _take_first_rows(graph, node, operand, place)


def _behind(node: Node, source: Node, kind: ValueType, assignment: Assignment) -> Node | None:
    """What a conversion of the value of `node` belongs to if it is placed right behind `source`; None: its reader.

    A pending sum that repeated layers begin with is converted where the sums between the layers are, as a part of a layer.
    """
    if source is node and kind == assignment.entries.get(node) and node.op == "call_function":
        return node
    return assignment.enters.get(node, source) if note(source).layout[assignment.axis] == P else None


def _insert(
    graph: Graph, source: Node, axis: str, kind: ValueType, reader: Node, mesh: Mesh, behind: Node | None
) -> Node:
    """A conversion node that gives `source` as `kind` over an axis.

    It stands right behind `source`, as a part of `behind`'s module, or before `reader`.
    """
    record, before = note(source), note(source).layout[axis]
    row = CONVERSIONS[before.kind, kind.kind]
    args = (source, row.name, *_placement(source, before, kind))
    size = _padded_size(source, before, kind, mesh.degree(axis))
    with graph.inserting_after(source) if behind is not None else graph.inserting_before(reader):
        made = graph.call_function(markers.convert, args, {"size": size} if size else {})
    made.meta["val"] = source.meta["val"]
    near = note(behind if behind is not None and record.kind == "op" else reader)
    fresh = Note(
        module=near.module,
        source=near.source,
        of_params=record.of_params,
        needs_grad=record.needs_grad,
        dims=record.dims,
        layout=record.layout.having(axis, kind),
        conversion=row.name,
        axis=axis,
        why=_why(source, kind, reader),
    )
    set_note(made, fresh)
    return made


def conversion_row(name: str) -> Conversion:
    """The row of the conversion table that is called `name`."""
    return next(row for row in CONVERSIONS.values() if row.name == name)


def _placement(source: Node, kind: ValueType, target: ValueType) -> tuple[int, ...]:
    dims = note(source).dims
    at = [(one.dim, outer_size(dims, one)) for one in (kind, target) if one.kind == "S"]
    return tuple(number for place in at for number in place)


def _padded_size(source: Node, kind: ValueType, target: ValueType, t: int) -> int:
    """Size of the padded dim that a conversion makes or undoes; 0 where t divides."""
    return max(padded_size(note(source).dims, one, t) for one in (kind, target))


def _why(source: Node, kind: ValueType, reader: Node) -> str:
    who = op_name(reader) if reader.op == "call_function" else "the loss"
    where = f"{note(reader).module}: " if note(reader).module else ""
    need = {"I": "a whole value", "R": "a whole input whose gradient is summed", "P": "a partial sum", "S": "a shard"}
    return f"{where}{who.removeprefix('aten.')} needs {need[kind.kind]}"


def _take_first_rows(graph: Graph, reader: Node, constant: Node, place: Place) -> None:
    """A constant whose rows are all equal meets a microbatch: as many of its rows as the microbatch has."""
    for arg in reader.all_input_nodes:
        if _origin(arg) is constant:
            with graph.inserting_before(reader):
                made = graph.call_function(markers.first_rows, (arg, place[0]))
            made.meta["val"] = arg.meta["val"]
            record = note(arg)
            fresh = Note(module=note(reader).module, source=note(reader).source, dims=record.dims)
            fresh.layout = record.layout.having(BATCH, S(*place))
            set_note(made, fresh)
            reader.replace_input_with(arg, made)


def _share_number(node: Node, pieces: int) -> None:
    """`sum over the batch + number`: each of the pieces adds its equal part of the number."""
    x, number, *rest = node.args
    node.args = (x, number / pieces, *rest)  # type: ignore[operator]
    note(node).extra["reason"] = f"a part of {number}: {pieces} pieces add up to it"


def _share_addends(graph: Graph, node: Node, pieces: int) -> None:
    """`sum over the batch + whole value`: each of the pieces adds its equal part of the whole value."""
    pending = {one for one in operands(node) if note(one).layout.batch == P}
    for group in linear_groups(node):
        whole = [one for one in group if note(one).layout.batch.is_whole]
        if len(whole) == len(group) or not pending <= set(group):
            continue
        for one in whole:
            with graph.inserting_before(node):
                made = graph.call_function(markers.share, (one, pieces))
            made.meta["val"] = one.meta["val"]
            record = note(one)
            fresh = Note(module=note(node).module, source=note(node).source, of_params=record.of_params)
            fresh.needs_grad, fresh.dims, fresh.layout = record.needs_grad, record.dims, record.layout.having(BATCH, P)
            set_note(made, fresh)
            node.replace_input_with(one, made)
        return


def check_connected(graph: Graph, axes: Axes, axis: str, degree: int) -> None:
    """Every operator's operand and result types over an axis must be a row of the table; InternalError lists all that are not.

    No atom is split that the degree does not divide, but a padded vocabulary.
    """
    table = _Table(axis, axes, Padding(graph, axes, degree), Sharing(graph, axes, degree))
    findings = [text for node in ops(graph) for text in _findings(node, table)]
    findings += [text for node in placeholders(graph, "param") for text in _odd_shards(node, table)]
    loss = output(graph).args[0]
    if isinstance(loss, Node) and table.of(loss) != I:
        findings.append(f"the loss is {table.of(loss)}, not whole")
    if findings:
        raise InternalError("CONNECTED", "; ".join(findings))


@dataclass(frozen=True)
class _Table:
    """What the types over one axis are held against."""

    axis: str
    axes: Axes
    padding: Padding
    sharing: Sharing

    def of(self, node: Node) -> ValueType:
        return note(node).layout[self.axis]


def _odd_shards(node: Node, table: _Table) -> Iterator[str]:
    """Shards of a dim that is no vocabulary and does not divide, and of an atom that ranks do not share."""
    kind, padding = table.of(node), table.padding
    origin = _origin(node)
    if kind.sharing > 1:
        if not table.sharing.allows(origin, kind):
            yield f"{site(node)} is {kind} of {note(node).dims[kind.dim]}, which {padding.degree} ranks do not share"
        return
    if kind.kind == "S" and not padding.divides_place(origin, (kind.dim, kind.atom)):
        yield f"{site(node)} is {kind} of {note(node).dims[kind.dim]}, which {padding.degree} ranks do not divide"


def _findings(node: Node, table: _Table) -> Iterator[str]:
    record, gives = note(node), table.of(node)
    yield from _odd_shards(node, table)
    if node.target is markers.convert and record.axis == table.axis:
        source = operands(node)[0]
        before = table.of(source)
        row = CONVERSIONS.get((before.kind, gives.kind))
        if row is None or row.name != record.conversion:
            yield f"{site(node)} converts {before} to {gives} by {record.conversion}"
        elif node.args[1:] != (row.name, *_placement(source, before, gives)):
            yield f"{site(node)} converts {before} to {gives} with arguments {node.args[1:]}"
        size = _padded_size(source, before, gives, table.padding.degree)
        if node.kwargs.get("size", 0) != size or (size and row is not None and row.name == "s_to_s"):
            yield f"{site(node)} converts a dim of {size} that is padded with size {node.kwargs.get('size', 0)}"
        if not (before.is_chunked and gives.is_chunked):
            yield f"{site(node)} converts {before} to {gives}: not both are chunks"
        return
    if node.target in markers.MARKERS:
        return
    read = [_origin(one) for one in operands(node)]
    types = dict(zip(read, map(table.of, operands(node)), strict=True))
    if not _is_row(node, types, table):
        shown = ", ".join(f"{one.name}: {kind}" for one, kind in types.items())
        yield f"{site(node)} maps ({shown}) to {gives}, which no rule allows"


def _is_row(node: Node, types: dict[Node, ValueType], table: _Table) -> bool:
    gives, axes = table.of(node), table.axes

    def rest_is_whole(taken: set[Node], kinds: tuple[ValueType, ...]) -> bool:
        """Operands outside of `taken` are whole; one without a gradient may be I wherever R is asked for."""
        rest = [(one, kind) for one, kind in types.items() if one not in taken]
        return all(kind in kinds or (kind == I and not note(one).of_params) for one, kind in rest)

    if (gives == I or (gives == R and axes.is_linear(node))) and rest_is_whole(set(), (gives,)):
        return True
    for group in linear_groups_of(node, types):
        if gives == P and all(types[one] == P for one in group) and rest_is_whole(set(group), (R,)):
            return True
    whole = [letter for letter in axes.letters(node) if table.padding.divides(node, letter)]
    for letter in whole + table.sharing.letters(node):
        carried = all(types.get(one) == letter.needs(one) for one in letter.places)
        expected = letter.gives or (I if letter.form in NO_COLLECTIVE_FORMS else P)
        taken = set(letter.places)
        if letter.out is None and not letter.form:
            for group in linear_groups_of(node, types):
                if taken & set(group):
                    taken |= set(group)
                    carried &= all(types[one] == P for one in group if one not in letter.places)
        if carried and gives == expected and rest_is_whole(taken, (R,)):
            return True
    return False


def linear_groups_of(node: Node, types: dict[Node, ValueType]) -> list[tuple[Node, ...]]:
    """Linear groups in terms of the values before conversion, which the letters speak of."""
    return [tuple(dict.fromkeys(_origin(one) for one in group)) for group in linear_groups(node)]


def _origin(node: Node) -> Node:
    while node.target in (markers.convert, markers.share, markers.first_rows):
        node = node.args[0]  # type: ignore[assignment]
    return node
