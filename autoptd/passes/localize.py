"""Give every value its local shape and rewrite operators that depend on sizes (CUT -> LOCAL).

In: a CUT graph, with the shapes of the trace. Out: the same graph with operators that are correct for the
shapes of one rank, in `note(node).local`.

Literal sizes are computed from the atoms of the result, never patched. Contractions over a split dim get
their local form: a mean becomes a sum divided by the global count, and a cross-entropy a sum divided by the
global number of valid labels. An embedding or a cross-entropy over a split vocabulary becomes the runtime's
vocabulary-parallel version, and a dropout takes its part of the global mask. `check_local` runs every node on
fake tensors and compares shapes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from autoptd.compat import FakeTensorMode
from autoptd.errors import InternalError
from autoptd.ir import markers
from autoptd.ir.layout import Layout, Sizes, shard_places, typed_over
from autoptd.ir.mesh import base, joined
from autoptd.ir.noise import NAMES, is_draw
from autoptd.ir.notes import Local, Note, local_shapes, note, op_name, ops, shape, site, tensor, value
from autoptd.ir.operators.record import CLASSES, QUERIES, argument, operands, set_arguments
from autoptd.ir.operators.table import is_over_classes, operator_of
from autoptd.ir.types import Dims, S, ValueType, outer_size, padded_size
from autoptd.passes.context import Context
from autoptd.passes.runner import CALLS, Form, graph_pass
from autoptd.passes.solve.batch_types import MARK


@graph_pass(
    takes=Form.CUT,
    gives=Form.LOCAL,
    changes=(CALLS, "axis", "local", "rows"),
    ensures=lambda graph, ctx: check_local(graph),
)
def localize(graph: Graph, ctx: Context) -> None:
    """Rewrite `graph` in place for local shapes."""
    sizes = ctx.sizes
    # Count losses per stage: that of an early exit may not be in the last stage.
    totals: Counter[int] = Counter()
    for node in list(ops(graph)):
        record, name = note(node), op_name(node)
        forms = record.forms.values()
        if "vocab_embedding" in forms:
            weight, ids, padding = node.args[0], node.args[1], argument(node, "padding_idx")
            node.target = markers.vocab_embedding
            node.args = (ids, weight, padding)
            node.kwargs = {"size": _vocabulary(node, weight, S(0, 0), sizes)}
        elif name == "aten.cross_entropy_loss" and forms:
            _local_cross_entropy(node, totals, sizes)
        elif is_over_classes(node):
            _local_classes(node, sizes)
        elif name == "aten.mean" and "mean" in forms:
            _local_mean(node, sizes)
        elif is_draw(node):
            _local_draw(node, sizes)
        elif QUERIES in forms and argument(node, "is_causal"):
            _local_attention(node)
        elif name == MARK:
            # Each microbatch adds an equal part.
            node.target, node.args = markers.share, (node.args[0], sizes.pieces)
        elif node.target is markers.batch_sum:
            # The index of the sum is its only argument besides the value.
            continue
        elif node.target is markers.convert:
            _local_placement(node, sizes)
        else:
            set_arguments(node, _local_sizes(node, sizes))
    _number_sums(graph)
    for node in graph.nodes:
        if value(node) is not None and node.op != "output":
            record = note(node)
            record.local = Local(local_shapes(node, sizes), shape(node))


def _local_cross_entropy(node: Node, totals: Counter[int], sizes: Sizes) -> None:
    record, read = note(node), operands(node)
    reduction = ("none", "mean", "sum")[argument(node, "reduction")]
    # The index of its count in `self.totals`; -1: it divides by nothing global.
    total = -1
    if reduction == "mean" and "token_loss" in record.forms.values():
        stage = min(record.stages, default=0)
        reduction, total = "sum", totals[stage]
        totals[stage] += 1
    labels, class_weights = read[1], read[2] if len(read) > 2 else None
    if record.rows.of_all and note(markers.unconverted(labels)).layout.batch.kind != "S":
        record.rows = replace(record.rows, counted_by=sizes.mesh.replicas)
    keywords = {
        "reduction": reduction,
        "ignore_index": argument(node, "ignore_index"),
        "label_smoothing": argument(node, "label_smoothing"),
        "vocab": "vocab_cross_entropy" in record.forms.values(),
        "size": _vocabulary(node, read[0], None, sizes),
        "total": total,
    }
    node.target, node.args, node.kwargs = markers.cross_entropy, (read[0], labels, class_weights), keywords


def _vocabulary(node: Node, table: Node, kind: ValueType | None, sizes: Sizes) -> int:
    """Return the unpadded size of a padded vocabulary, 0 if it is not padded; note the axis that splits it.

    `kind` is the type of `table` over that axis, which defaults to the one in its note.
    """
    axes = [axis for axis, form in note(node).forms.items() if form.startswith(("vocab_", CLASSES))]
    if not axes:
        return 0
    axis = axes[0]
    note(node).axis = axis
    return padded_size(note(table).dims, kind or note(table).layout[axis], sizes.mesh.degree(axis))


def _local_classes(node: Node, sizes: Sizes) -> None:
    """Localize an operator over classes that are split across ranks."""
    read = operands(node)
    dim = argument(node, "dim")
    keywords = {"dim": dim[0] if isinstance(dim, (list, tuple)) else dim}
    if argument(node, "keepdim"):
        keywords["keepdim"] = True
    if size := _vocabulary(node, read[0], None, sizes):
        keywords["size"] = size
    if tensor(node).dtype != tensor(read[0]).dtype and tensor(node).is_floating_point():
        keywords["dtype"] = tensor(node).dtype
    form = next(form for form in note(node).forms.values() if form.startswith(CLASSES))
    node.target, node.args, node.kwargs = markers.OVER_CLASSES[form], tuple(read), keywords


def _local_mean(node: Node, sizes: Sizes) -> None:
    x = operands(node)[0]
    dims = argument(node, "dim")
    # mean() has no dims: all of them.
    dims = [d % tensor(x).dim() for d in dims] if dims else list(range(tensor(x).dim()))
    count = math.prod(shape(x)[d] for d in dims)
    # Take the mean over the samples of the whole batch or of a microbatch, not over those of the trace.
    rows = sizes.rows if note(node).rows.of_microbatch else sizes.global_rows
    if note(x).layout.batch.kind == "S" and note(x).layout.batch.dim in dims:
        count = count * rows // sizes.traced_rows
    node.target, node.args, node.kwargs = markers.mean, (x, dims, bool(argument(node, "keepdim")), count), {}


def _local_attention(node: Node) -> None:
    """Make causal attention use global query positions; with a mask, its rows already carry them."""
    record = note(node)
    record.axis = next(axis for axis, form in record.forms.items() if form == QUERIES)
    given = {"enable_gqa": argument(node, "enable_gqa"), "order": record.layout[record.axis].order}
    given |= {"window": record.tokens.reads_window}
    keywords = {name: value for name, value in given.items() if value}
    # A scale of 0 is one.
    if (scale := argument(node, "scale")) is not None:
        keywords = {"scale": scale, **keywords}
    node.target, node.args, node.kwargs = markers.causal_attention, tuple(operands(node)), keywords


def _local_draw(node: Node, sizes: Sizes) -> None:
    """Note where batch rows and shards lie in the local value: masks are indexed by global position."""
    record = note(node)
    cuts = [*_batch_cuts(record.layout, sizes), *record.layout.cuts(sizes.mesh)]
    dims = _divided(record.dims, cuts)

    def place(kind: ValueType) -> tuple[int, int] | None:
        return (kind.dim, outer_size(dims, kind)) if kind.kind == "S" else None

    chunks = _chunks(record, sizes)
    record.axis = joined(axis for axis, _ in chunks)
    # (dim, elements of that dim before them), by which `rt.dropout` numbers the rows of the mask.
    batch = place(record.draw.rows)
    shards = [place(kind) for _, kind in chunks]
    shard = tuple(shards) if len(shards) > 1 else next(iter(shards), None)
    number, kind = record.draw.site, NAMES.get(op_name(node))
    node.target = markers.noise if kind else markers.dropout
    node.args = (node.args[0], kind or node.args[1], number, batch, shard)


def _chunks(record: Note, sizes: Sizes) -> list[tuple[str, ValueType]]:
    """Return the axes or sub-axes that chunk a value, with the first type over each, outermost first."""
    found: list[tuple[str, ValueType]] = []
    for axis in sizes.mesh.value_axes:
        layout = record.layout.over(axis)
        chunk_axis = layout.chunk_axis(record.dims, sizes.mesh)
        if chunk_axis is not None:
            found.append((chunk_axis, layout.shards[0][1]))

    def place(chunk: tuple[str, ValueType]) -> tuple[int, int, bool]:
        axis, kind = chunk
        return kind.dim, kind.atom, base(axis) == record.draw.inner_axis

    return sorted(found, key=place)


def _divided(dims: Dims, cuts: Iterable[tuple[int, int, int]]) -> list[list[int]]:
    """Divide the atoms of dims by `cuts`, each a (dim, atom, number of pieces)."""
    divided = [list(atoms) for atoms in dims]
    for dim, atom, pieces in cuts:
        # A dim of size 1 has no atoms.
        if divided[dim]:
            divided[dim][atom] //= pieces
    return divided


def _batch_cuts(layout: Layout, sizes: Sizes) -> list[tuple[int, int, int]]:
    """Return the cut (dim, atom, pieces) that splits a traced value into microbatches, if any."""
    batch = layout.batch
    if batch.kind == "S" and sizes.rows_divisor > 1:
        return [(batch.dim, batch.atom, sizes.rows_divisor)]
    return []


def _local_placement(node: Node, sizes: Sizes) -> None:
    """Correct the position of a conversion's shards, since a microbatch may have fewer samples than the
    trace.

    That matters in a dim with the batch outside of the shards.
    """
    record = note(node)
    dims = _divided(record.dims, _batch_cuts(record.layout, sizes))
    source, name = node.args[:2]
    layouts = (note(source).layout, record.layout)  # type: ignore[arg-type]
    axis = typed_over(record.axis)
    node.args = (source, name, *shard_places(tuple(map(tuple, dims)), axis, layouts, sizes.mesh))


def _local_sizes(node: Node, sizes: Sizes) -> dict[str, Any]:
    """Return the size-dependent arguments of `node`, for the sizes of one rank."""
    record = operator_of(node)
    if record.local_sizes:
        return dict(record.local_sizes(node, sizes))
    return {name: list(local_shapes(node, sizes)[0]) for name in record.sizes}


def _number_sums(graph: Graph) -> None:
    """Number the batch sums and note the round in which each is computed."""
    rounds: dict[Node, int] = {}
    number = 0
    for node in graph.nodes:
        # The last round among the sums that it is computed from.
        known = max((rounds[read] for read in node.all_input_nodes), default=0)
        rounds[node] = known
        if node.target is markers.batch_sum:
            node.args = (node.args[0], number)
            note(node).rows = replace(note(node).rows, round=known)
            rounds[node], number = known + 1, number + 1


def check_local(graph: Graph) -> None:
    """Run every operator on fake tensors of local shapes and compare; raise InternalError with all findings.

    Identical layers repeat operators, so each (operator, literals, operands' local shapes and dtypes) is run
    once.
    """
    findings: list[str] = []
    results: dict[str, list[tuple[int, ...]] | str] = {}
    with FakeTensorMode():
        for node in ops(graph):
            if value(node) is None or node.target in markers.MARKERS:
                continue
            call = repr((str(node.target), *map_arg((node.args, node.kwargs), _LocalValue)))
            if call not in results:
                results[call] = _local_result(node)
            result, expected = results[call], note(node).local.shapes
            if isinstance(result, str):
                findings.append(f"{site(node)} fails on local shapes: {result}")
            elif result != expected:
                findings.append(f"{site(node)} gives {result} where {expected} is planned")
    if findings:
        raise InternalError("LOCAL", "; ".join(findings))


class _LocalValue:
    """An operand with its local shapes, as passed to an operator; prints as its shapes and dtype."""

    def __init__(self, node: Node) -> None:
        self.shapes, self.dtype = note(node).local.shapes, tensor(node).dtype
        self.is_tuple = isinstance(value(node), (tuple, list))

    def __repr__(self) -> str:
        return f"{self.dtype}{self.shapes}{self.is_tuple}"

    def make(self) -> Any:
        tensors = [torch.empty(local_shape, dtype=self.dtype) for local_shape in self.shapes]
        return tensors if self.is_tuple else tensors[0]


def _local_result(node: Node) -> list[tuple[int, ...]] | str:
    """Return the result shapes of `node` for its operands' local shapes, or why it cannot run on them."""
    args, kwargs = map_arg((node.args, node.kwargs), lambda operand: _LocalValue(operand).make())
    try:
        result = node.target(*args, **kwargs)  # type: ignore[operator]
    # Operators raise many kinds of exceptions: report any of them as the finding.
    except Exception as error:
        return str(error).splitlines()[0]
    results = result if isinstance(result, (tuple, list)) else [result]
    return [tuple(part.shape) for part in results]
