"""Divide work over the batch among microbatches and replicas: sums, means, penalties, constants (CONNECTED ->
CONNECTED).

In: a graph with conversions over every value axis, whose readers list in their notes what they need of the whole
batch (`solve/batch_types.py`). Out: the same graph with the markers and conversions that provide it:

- `take_whole_numbers` (ANNOTATED): numbers that depend on the batch size become those of the whole batch;
- `read_batch_sums`: readers of a sum over the whole batch get a `markers.batch_sum`, of type I over the batch;
- `take_whole_rows`: operators that mix samples read the rows of all replicas, which have one microbatch each;
- `divide_addends`: each microbatch adds an equal part of a value that is whole, and takes its rows of a constant.

    read_batch_sums(graph, ctx)     # mask.sum() -> batch_sum(mask.sum())
    take_whole_rows(graph, ctx)     # left @ right.T -> s_to_r(left) @ s_to_r(right.T)
    divide_addends(graph, ctx)      # losses.sum() + penalty -> losses.sum() + share(penalty, 8)
"""

from __future__ import annotations

from torch.fx import Graph, Node

from autoptd.ir import markers
from autoptd.ir.layout import BATCH, shard_places
from autoptd.ir.notes import Note, Rows, note, ops, output, set_note
from autoptd.ir.operators.record import operands
from autoptd.ir.operators.table import linear_groups
from autoptd.ir.types import CONVERSIONS, I, P, R, S
from autoptd.passes.communicate import check_over_batch, note_of
from autoptd.passes.connected import origin_of
from autoptd.passes.context import Context
from autoptd.passes.reader_names import reader_name
from autoptd.passes.runner import CALLS, Form, divides_rows, graph_pass
from autoptd.passes.solve.batch_types import adds_number

SHARED = "all replicas have this loss: each counts an equal part"


@graph_pass(takes=Form.ANNOTATED, gives=Form.ANNOTATED, when=divides_rows, changes=(CALLS,))
def take_whole_numbers(graph: Graph, ctx: Context) -> None:
    """Replace numbers that depend on the batch size by those of the whole batch."""
    for node in ops(graph):
        if (call := note(node).rows.whole_call) is not None:
            node.args, node.kwargs = call


@graph_pass(
    takes=Form.CONNECTED, gives=Form.CONNECTED, when=divides_rows, changes=(CALLS,), ensures=check_over_batch
)
def read_batch_sums(graph: Graph, ctx: Context) -> None:
    """Insert the markers before the conversions of the sums that readers need.

    A batch sum may be computed from others (a variance from a mean): those are known one *round* earlier.
    """
    made: dict[Node, Node] = {}
    for reader in list(ops(graph)):
        wanted = note(reader).rows.sums
        for arg in list(reader.all_input_nodes) if wanted else ():
            if markers.unconverted(arg) in wanted:
                reader.replace_input_with(arg, _sum_of(graph, arg, made))
    # Conversions that only the readers of the sums used are dead now.
    for arg in reversed(list(made)):
        if arg.target is markers.convert and not arg.users:
            graph.erase_node(arg)


def _sum_of(graph: Graph, arg: Node, made: dict[Node, Node]) -> Node:
    """Return the batch sum of a value, converted over other axes like the value itself."""
    if arg in made:
        return made[arg]
    if arg.target is markers.convert:
        source = _sum_of(graph, arg.args[0], made)  # type: ignore[arg-type]
        args, target = (source, *arg.args[1:]), arg.target
    else:
        args, target = (arg,), markers.batch_sum
    with graph.inserting_after(arg):
        result = graph.call_function(target, args, arg.kwargs if arg.target is markers.convert else {})
    result.meta["val"] = arg.meta["val"]
    record = set_note(result, note(arg).bare())
    record.kind, record.layout = "op", record.layout.having(BATCH, I)
    is_largest = note(arg).rows.is_largest
    record.forms, record.rows = {}, Rows(is_largest=is_largest)
    if target is markers.batch_sum:
        what = "the largest entries of" if is_largest else "a sum over"
        record.why = f"{what} the whole batch, known before the first forward"
    made[arg] = result
    return result


@graph_pass(
    takes=Form.CONNECTED, gives=Form.CONNECTED, when=divides_rows, changes=(CALLS,), ensures=check_over_batch
)
def take_whole_rows(graph: Graph, ctx: Context) -> None:
    """Insert a conversion over dp, S -> R or P -> R, before operators that read rows whole; divide a whole loss.

    It is an all-gather or an all-reduce in forward. Downstream values are the same on all replicas, and each replica
    has a partial cotangent, as for a parameter: a whole loss is scaled by 1/d on each. The backward of the
    conversion, a reduce-scatter or an all-reduce, adds these parts, and gradients are summed over dp as usual.
    """
    made: dict[Node, Node] = {}
    for reader in list(ops(graph)):
        wanted = note(reader).rows.taken_whole
        for arg in list(reader.all_input_nodes) if wanted else ():
            if markers.unconverted(arg) in wanted:
                if arg not in made:
                    made[arg] = _convert(graph, arg, reader, ctx)
                reader.replace_input_with(arg, made[arg])
    loss = output(graph).args[0]
    assert isinstance(loss, Node)
    if note(loss).layout.batch == R:
        _share_loss(graph, loss, ctx)


def _convert(graph: Graph, source: Node, reader: Node, ctx: Context) -> Node:
    """Insert the conversion of a value before its first reader."""
    (axis,) = ctx.mesh.batch_axes
    record, kind = note(source), note(source).layout.batch
    row = CONVERSIONS[kind.kind, "R"]
    places = shard_places(record.dims, BATCH, [record.layout], ctx.mesh)
    with graph.inserting_before(reader):
        converted = graph.call_function(markers.convert, (source, row.name, *places))
    converted.meta["val"] = source.meta["val"]
    whole = set_note(converted, note_of(record, note(reader), record.layout.having(BATCH, R)))
    whole.conversion, whole.axis = row.name, axis
    need = "rows" if kind.kind == "S" else "the sum over the rows"
    where = f"{note(reader).module}: " if note(reader).module else ""
    whole.why = f"{where}{reader_name(reader)} needs {need} of all replicas"
    return converted


def _share_loss(graph: Graph, loss: Node, ctx: Context) -> None:
    """Scale the loss, which every replica has, to an equal part on each."""
    with graph.inserting_after(loss):
        share = graph.call_function(markers.share, (loss, ctx.mesh.replicas))
    share.meta["val"] = loss.meta["val"]
    record = note(loss)
    set_note(share, note_of(record, record, record.layout.having(BATCH, P))).reason = SHARED
    output(graph).replace_input_with(loss, share)


@graph_pass(
    takes=Form.CONNECTED,
    gives=Form.CONNECTED,
    when=divides_rows,
    changes=(CALLS, "reason"),
    ensures=check_over_batch,
)
def divide_addends(graph: Graph, ctx: Context) -> None:
    """Divide the numbers and whole values added to sums over the batch; take the rows of constants."""
    for node in list(ops(graph)):
        if note(node).layout.batch == P and adds_number(node):
            _share_number(node, ctx.pieces)
        elif note(node).layout.batch == P:
            _share_addends(graph, node, ctx.pieces)
        for operand, place in note(node).rows.equal.items():
            _take_first_rows(graph, node, operand, place)


def _share_addends(graph: Graph, node: Node, pieces: int) -> None:
    """Divide the whole value in `sum over the batch + whole value`: each of the pieces adds an equal part."""
    pending = {operand for operand in operands(node) if note(operand).layout.batch == P}
    for group in linear_groups(node):
        whole = [operand for operand in group if note(operand).layout.batch.is_whole]
        # With every operand whole, nothing in this group is a pending sum.
        if len(whole) == len(group) or not pending <= set(group):
            continue
        for operand in whole:
            with graph.inserting_before(node):
                share = graph.call_function(markers.share, (operand, pieces))
            share.meta["val"] = operand.meta["val"]
            record = note(operand)
            set_note(share, note_of(record, note(node), record.layout.having(BATCH, P)))
            node.replace_input_with(operand, share)
        return


def _share_number(node: Node, pieces: int) -> None:
    """Divide the number in `sum over the batch + number`: each of the pieces adds an equal part."""
    x, number, *rest = node.args
    node.args = (x, number / pieces, *rest)  # type: ignore[operator]
    note(node).reason = f"a part of {number}: {pieces} pieces add up to it"


def _take_first_rows(graph: Graph, reader: Node, constant: Node, place: tuple[int, int]) -> None:
    """Give `reader` as many rows of a constant as its microbatch has; as all are equal, it takes the first."""
    for arg in reader.all_input_nodes:
        if origin_of(arg) is constant:
            with graph.inserting_before(reader):
                rows = graph.call_function(markers.first_rows, (arg, place[0]))
            rows.meta["val"] = arg.meta["val"]
            record = note(arg)
            new_note = Note(module=note(reader).module, source=note(reader).source, dims=record.dims)
            new_note.layout = record.layout.having(BATCH, S(*place))
            set_note(rows, new_note)
            reader.replace_input_with(arg, rows)
