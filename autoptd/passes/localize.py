"""Give every value its local shape and rewrite what depends on sizes (CUT -> LOCAL).

Literal sizes are regenerated from the atoms of the result, never patched. Contractions over a split dim get their local form:
a mean becomes a sum over the global count, a cross-entropy a sum over the global number of valid labels, an embedding or a
cross-entropy over a split vocabulary the runtime's vocabulary-parallel one, a dropout the part of its global mask.
`check_local` re-runs every node on fake tensors and compares shapes.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from autoptd.compat import FakeTensorMode
from autoptd.errors import InternalError
from autoptd.ir import markers
from autoptd.ir.layout import BATCH, Layout
from autoptd.ir.notes import note, op_name, ops, shape, site, tensor, value
from autoptd.ir.operators.record import argument, operands, set_arguments
from autoptd.ir.operators.table import operator_of
from autoptd.ir.sizes import Sizes, local_shapes
from autoptd.ir.steps import shard_places
from autoptd.ir.types import I, S, ValueType, outer_size, padded_size
from autoptd.passes.context import Context
from autoptd.passes.runner import CALLS, Form, graph_pass


@graph_pass(
    takes=Form.CUT,
    gives=Form.LOCAL,
    changes=(CALLS, "axis"),
    ensures=lambda graph, ctx: check_local(graph),
)
def localize(graph: Graph, ctx: Context) -> None:
    """Rewrite `graph` in place for local shapes."""
    sizes = ctx.sizes
    totals: Counter[int] = Counter()  # per stage: a loss of an early exit need not be in the last one
    for node in list(ops(graph)):
        record, name = note(node), op_name(node)
        forms = record.forms.values()
        if "vocab_embedding" in forms:
            weight, ids = node.args[0], node.args[1]
            node.target, node.args, node.kwargs = (
                markers.vocab_embedding,
                (ids, weight, argument(node, "padding_idx")),
                {"size": _vocabulary(node, weight, S(0, 0), sizes)},
            )
        elif name == "aten.cross_entropy_loss" and forms:
            _local_cross_entropy(node, totals, sizes)
        elif name == "aten.mean" and "mean" in forms:
            _local_mean(node, sizes)
        elif name == "aten.dropout":
            _local_dropout(node, sizes)
        elif node.target is markers.convert:
            _local_placement(node, sizes)
        else:
            set_arguments(node, _local_sizes(node, sizes))
    for node in graph.nodes:
        if value(node) is not None and node.op != "output":
            record = note(node)
            record.extra["global_shape"] = shape(node)
            record.extra["local_shapes"] = local_shapes(node, sizes)


def _local_cross_entropy(node: Node, totals: Counter[int], sizes: Sizes) -> None:
    record, read = note(node), operands(node)
    reduction = ("none", "mean", "sum")[argument(node, "reduction")]
    total = -1
    if reduction == "mean" and "token_loss" in record.forms.values():
        stage = min(record.stages, default=0)
        reduction, total = "sum", totals[stage]
        totals[stage] += 1
    keywords = {
        "reduction": reduction,
        "ignore_index": argument(node, "ignore_index"),
        "label_smoothing": argument(node, "label_smoothing"),
        "vocab": "vocab_cross_entropy" in record.forms.values(),
        "size": _vocabulary(node, read[0], None, sizes),
        "total": total,
    }
    node.target, node.args, node.kwargs = (
        markers.cross_entropy,
        (*read[:2], read[2] if len(read) > 2 else None),
        keywords,
    )


def _vocabulary(node: Node, table: Node, kind: ValueType | None, sizes: Sizes) -> int:
    """Size of the dim that the axis of a mesh pads which splits `node` by its vocabulary; 0 where nothing is padded.

    `kind` is what the axis does to `table`, by default its type.
    """
    axis = next((axis for axis, form in note(node).forms.items() if axis != BATCH and form), None)
    if axis is None:
        return 0
    note(node).axis = axis
    return padded_size(note(table).dims, kind or note(table).layout[axis], sizes.mesh.degree(axis))


def _local_mean(node: Node, sizes: Sizes) -> None:
    x = operands(node)[0]
    dims = argument(node, "dim")
    dims = [d % tensor(x).dim() for d in dims] if dims else list(range(tensor(x).dim()))
    count = math.prod(shape(x)[d] for d in dims)
    if note(x).layout.batch.kind == "S" and note(x).layout.batch.dim in dims:
        count = count // sizes.traced_rows * sizes.global_rows
    node.target, node.args, node.kwargs = markers.mean, (x, dims, bool(argument(node, "keepdim")), count), {}


def _local_dropout(node: Node, sizes: Sizes) -> None:
    """The mask is numbered in the global value: say where in the local one the rows of the batch and the shards lie."""
    record = note(node)
    rows, dims = record.extra["rows"], [list(atoms) for atoms in record.dims]
    cuts = [*_batch_cuts(record.layout, sizes), *record.layout.cuts(sizes.mesh)]
    for dim, atom, pieces in cuts:
        if dims[dim]:
            dims[dim][atom] //= pieces
    record.axis = record.layout.chunk_axis(record.dims, sizes.mesh) or ""
    kinds = (rows, record.layout.shards[0][1] if record.axis else I)
    batch, shard = ((kind.dim, outer_size(dims, kind)) if kind.kind == "S" else None for kind in kinds)
    node.target, node.args = markers.dropout, (node.args[0], node.args[1], record.extra["site"], batch, shard)


def _batch_cuts(layout: Layout, sizes: Sizes) -> list[tuple[int, int, int]]:
    """(dim, atom, pieces) of what microbatches cut."""
    batch = layout.batch
    return (
        [(batch.dim, batch.atom, sizes.rows_divisor)] if batch.kind == "S" and sizes.rows_divisor > 1 else []
    )


def _local_placement(node: Node, sizes: Sizes) -> None:
    """Where shards lie in a dim that carries the batch before them: a microbatch may have fewer rows than the trace."""
    record = note(node)
    dims = [list(atoms) for atoms in record.dims]
    for dim, atom, pieces in _batch_cuts(record.layout, sizes):
        if dims[dim]:
            dims[dim][atom] //= pieces
    source, name = node.args[:2]
    layouts = (note(source).layout, record.layout)  # type: ignore[arg-type]
    node.args = (source, name, *shard_places(tuple(map(tuple, dims)), record.axis, layouts, sizes.mesh))


def _local_sizes(node: Node, sizes: Sizes) -> dict[str, Any]:
    """The arguments of `node` that depend on sizes, as they are on one rank."""
    record = operator_of(node)
    if record.local_sizes:
        return dict(record.local_sizes(node, sizes))
    return {name: list(local_shapes(node, sizes)[0]) for name in record.sizes}


def check_local(graph: Graph) -> None:
    """Run every operator on fake tensors of local shapes and compare; InternalError lists all that differ.

    Equal layers run equal operators: each (operator, literals, operands' local shapes and dtypes) is run once.
    """
    findings: list[str] = []
    made: dict[str, list[tuple[int, ...]] | str] = {}
    with FakeTensorMode():
        for node in ops(graph):
            if value(node) is None or node.target in markers.MARKERS:
                continue
            call = repr((str(node.target), *map_arg((node.args, node.kwargs), _LocalValue)))
            if call not in made:
                made[call] = _local_result(node)
            found, expected = made[call], note(node).extra["local_shapes"]
            if isinstance(found, str):
                findings.append(f"{site(node)} fails on local shapes: {found}")
            elif found != expected:
                findings.append(f"{site(node)} gives {found} where {expected} is planned")
    if findings:
        raise InternalError("LOCAL", "; ".join(findings))


class _LocalValue:
    """What an operator gets of an operand: prints as the local shapes and the dtype."""

    def __init__(self, node: Node) -> None:
        self.shapes, self.dtype = note(node).extra["local_shapes"], tensor(node).dtype
        self.is_tuple = isinstance(value(node), (tuple, list))

    def __repr__(self) -> str:
        return f"{self.dtype}{self.shapes}{self.is_tuple}"

    def make(self) -> Any:
        made = [torch.empty(one, dtype=self.dtype) for one in self.shapes]
        return made if self.is_tuple else made[0]


def _local_result(node: Node) -> list[tuple[int, ...]] | str:
    """The shapes that `node` gives for its operands' local shapes, or why it cannot run on them."""
    args, kwargs = map_arg((node.args, node.kwargs), lambda one: _LocalValue(one).make())
    try:
        made = node.target(*args, **kwargs)  # type: ignore[operator]
    except Exception as error:  # any failure of an operator on its local shapes is the finding
        return str(error).splitlines()[0]
    return [tuple(one.shape) for one in (made if isinstance(made, (tuple, list)) else [made])]


__all__ = ["check_local", "localize"]
