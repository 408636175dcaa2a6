"""Give operators that mix samples the rows of all replicas, and sums over them (CONNECTED -> CONNECTED).

In: a graph whose readers list in their notes the operands that they read whole (`solve/batch_types.py`); each
replica has one microbatch. Out: a conversion over dp before every such reader, S -> R or P -> R, that is an
all-gather or an all-reduce in forward. Downstream values are the same on all replicas, and each replica has a
partial cotangent, as for a parameter: a whole loss is scaled by 1/d on each. The backward of the conversions,
a reduce-scatter or an all-reduce, adds these parts, and gradients are summed over dp as usual.

    take_whole_rows(graph, ctx)     # left @ right.T -> s_to_r(left) @ s_to_r(right.T)
"""

from __future__ import annotations

from torch.fx import Graph, Node

from autoptd.ir import markers
from autoptd.ir.layout import BATCH
from autoptd.ir.mesh import Mesh
from autoptd.ir.notes import note, ops, output, set_note
from autoptd.ir.steps import shard_places
from autoptd.ir.types import CONVERSIONS, P, R
from autoptd.passes.communicate import check_over_batch, note_of
from autoptd.passes.context import Context
from autoptd.passes.reader_names import reader_name
from autoptd.passes.runner import CALLS, Form, divides_rows, graph_pass

SHARED = "all replicas have this loss: each counts an equal part"


@graph_pass(
    takes=Form.CONNECTED, gives=Form.CONNECTED, when=divides_rows, changes=(CALLS,), ensures=check_over_batch
)
def take_whole_rows(graph: Graph, ctx: Context) -> None:
    """Insert the conversions after those over other axes, one for all readers; divide a whole loss."""
    made: dict[Node, Node] = {}
    for reader in list(ops(graph)):
        wanted = note(reader).rows.taken_whole
        for arg in list(reader.all_input_nodes) if wanted else ():
            if markers.unconverted(arg) in wanted:
                if arg not in made:
                    made[arg] = _convert(graph, arg, reader, ctx.mesh)
                reader.replace_input_with(arg, made[arg])
    loss = output(graph).args[0]
    assert isinstance(loss, Node)
    if note(loss).layout.batch == R:
        _share_loss(graph, loss, ctx.mesh)


def _convert(graph: Graph, source: Node, reader: Node, mesh: Mesh) -> Node:
    """Insert the conversion of a value before its first reader."""
    (axis,) = mesh.batch_axes
    record, kind = note(source), note(source).layout.batch
    row = CONVERSIONS[kind.kind, "R"]
    places = shard_places(record.dims, BATCH, [record.layout], mesh)
    with graph.inserting_before(reader):
        converted = graph.call_function(markers.convert, (source, row.name, *places))
    converted.meta["val"] = source.meta["val"]
    whole = set_note(converted, note_of(record, note(reader), record.layout.having(BATCH, R)))
    whole.conversion, whole.axis = row.name, axis
    need = "rows" if kind.kind == "S" else "the sum over the rows"
    where = f"{note(reader).module}: " if note(reader).module else ""
    whole.why = f"{where}{reader_name(reader)} needs {need} of all replicas"
    return converted


def _share_loss(graph: Graph, loss: Node, mesh: Mesh) -> None:
    """Scale the loss, which every replica has, to an equal part on each."""
    with graph.inserting_after(loss):
        share = graph.call_function(markers.share, (loss, mesh.replicas))
    share.meta["val"] = loss.meta["val"]
    record = note(loss)
    set_note(share, note_of(record, record, record.layout.having(BATCH, P))).reason = SHARED
    output(graph).replace_input_with(loss, share)


__all__ = ["take_whole_rows"]
