"""Divide the addends of sums over the batch, and the rows of constants, among microbatches and replicas
(CONNECTED -> CONNECTED).

In: a graph with conversions over every axis. Out: the same graph, in which a whole value added to a pending
sum becomes a `markers.share`, a number is divided, and a constant whose rows are all equal becomes a
`markers.first_rows`. Each of the pieces adds an equal part.

    divide_addends(graph, ctx)      # losses.sum() + penalty -> losses.sum() + share(penalty, 8)
"""

from __future__ import annotations

from torch.fx import Graph, Node

from autoptd.ir import markers
from autoptd.ir.layout import BATCH
from autoptd.ir.notes import Note, note, ops, set_note
from autoptd.ir.operators.record import operands
from autoptd.ir.operators.table import linear_groups
from autoptd.ir.types import P, S
from autoptd.passes.axes.axes import Place
from autoptd.passes.communicate import check_over_batch, note_of, origin_of
from autoptd.passes.context import Context
from autoptd.passes.runner import CALLS, Form, divides_rows, graph_pass
from autoptd.passes.solve.batch_types import adds_number


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


def _take_first_rows(graph: Graph, reader: Node, constant: Node, place: Place) -> None:
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


__all__ = ["divide_addends"]
