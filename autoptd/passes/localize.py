"""Give every value its local shape and rewrite what depends on sizes (CUT -> LOCAL).

Literal sizes are regenerated from the atoms of the result, never patched. Contractions over a split dim get their local form:
a mean becomes a sum over the global count, a cross-entropy a sum over the global number of valid labels, an embedding or a
cross-entropy over a split vocabulary the runtime's vocabulary-parallel one, a dropout the part of its global mask.
`check_local` re-runs every node on fake tensors and compares shapes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from autoptd.compat import FakeTensorMode
from autoptd.errors import InternalError
from autoptd.ir import markers
from autoptd.ir.layout import BATCH, Layout
from autoptd.ir.notes import note, op_name, ops, shape, site, tensor, value
from autoptd.ir.sizes import Sizes, local_shapes
from autoptd.ir.steps import shard_places
from autoptd.ir.types import I, S, ValueType, outer_size, padded_size
from autoptd.passes.ops.dim_links import argument, operands


def localize(graph: Graph, sizes: Sizes) -> int:
    """Rewrite `graph` in place for local shapes; returns how many global counts the losses divide by."""
    totals: Counter[int] = Counter()  # per stage: a loss of an early exit need not be in the last one
    for node in list(ops(graph)):
        record, name = note(node), op_name(node)
        forms = record.forms.values()
        if "vocab_embedding" in forms:
            weight, ids = node.args[0], node.args[1]
            node.target, node.args, node.kwargs = (
                markers.vocab_embedding,
                (ids, weight, argument(node, 2, "padding_idx", -1)),
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
        elif str(node.target) in SIZE_ARGUMENTS:
            SIZE_ARGUMENTS[str(node.target)](node, sizes)
    for node in graph.nodes:
        if value(node) is not None and node.op != "output":
            record = note(node)
            record.extra["global_shape"] = shape(node)
            record.extra["local_shapes"] = local_shapes(node, sizes)
    check_local(graph)
    return totals.total()


def _local_cross_entropy(node: Node, totals: Counter[int], sizes: Sizes) -> None:
    record, read = note(node), operands(node)
    reduction = ("none", "mean", "sum")[argument(node, 3, "reduction", 1)]
    total = -1
    if reduction == "mean" and "token_loss" in record.forms.values():
        stage = min(record.stages, default=0)
        reduction, total = "sum", totals[stage]
        totals[stage] += 1
    keywords = {
        "reduction": reduction,
        "ignore_index": argument(node, 4, "ignore_index", -100),
        "label_smoothing": argument(node, 5, "label_smoothing", 0.0),
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
    dims = argument(node, 1, "dim")
    dims = [d % tensor(x).dim() for d in dims] if dims else list(range(tensor(x).dim()))
    count = math.prod(shape(x)[d] for d in dims)
    if note(x).layout.batch.kind == "S" and note(x).layout.batch.dim in dims:
        count = count // sizes.traced_rows * sizes.global_rows
    node.target, node.args, node.kwargs = markers.mean, (x, dims, bool(argument(node, 2, "keepdim", False)), count), {}


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
    return [(batch.dim, batch.atom, sizes.rows_divisor)] if batch.kind == "S" and sizes.rows_divisor > 1 else []


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


def _result_sizes(position: int) -> Callable[[Node, Sizes], None]:
    def rewrite(node: Node, sizes: Sizes) -> None:
        _set(node, position, list(local_shapes(node, sizes)[0]))

    return rewrite


def _repeats(node: Node, sizes: Sizes) -> None:
    x, out = local_shapes(operands(node)[0], sizes)[0], local_shapes(node, sizes)[0]
    _set(node, 1, [b // a for a, b in zip((1,) * (len(out) - len(x)) + x, out, strict=True)])


def _interleaved(node: Node, sizes: Sizes) -> None:
    x, out = (local_shapes(one, sizes)[0] for one in (operands(node)[0], node))
    _set(node, 1, math.prod(out) // math.prod(x))


def _split_size(node: Node, sizes: Sizes) -> None:
    dim = argument(node, 2, "dim", 0) % tensor(node).dim()
    pieces = [piece[dim] for piece in local_shapes(node, sizes)]
    _set(node, 1, pieces[0] if isinstance(node.args[1], int) else pieces)


def _unflatten_sizes(node: Node, sizes: Sizes) -> None:
    x = operands(node)[0]
    dim = argument(node, 1, "dim") % tensor(x).dim()
    count = tensor(node).dim() - tensor(x).dim() + 1
    _set(node, 2, list(local_shapes(node, sizes)[0][dim : dim + count]))


def _slice_bounds(node: Node, sizes: Sizes) -> None:
    """Bounds of a dim that is split scale with it; a split dim is only ever sliced into equal pieces."""
    x = operands(node)[0]
    dim = argument(node, 1, "dim", 0) % tensor(x).dim()
    full, local = shape(x)[dim], local_shapes(x, sizes)[0][dim]
    if local != full:
        bounds = [argument(node, 2, "start", 0), argument(node, 3, "end", full)]
        start, end = (min(max(b + full, 0) if b < 0 else b, full) if b is not None else full for b in bounds)
        node.args = (x, dim, start * local // full, end * local // full)  # of a padded dim: all of it
        node.kwargs = {}


def _groups(node: Node, sizes: Sizes) -> None:
    """Groups of a convolution, where a rank has some of them."""
    x, weight = (local_shapes(one, sizes)[0] for one in operands(node)[:2])
    if argument(node, 6, "groups", 1) != 1:
        groups = x[len(x) - len(weight) + 1] // weight[1]
        if "groups" in node.kwargs:
            node.kwargs = {**node.kwargs, "groups": groups}
        else:
            _set(node, 6, groups)


def _set(node: Node, position: int, new: Any) -> None:
    node.args = (*node.args[:position], new, *node.args[position + 1 :])


# By overload: x.view(dtype) has no sizes.
SIZE_ARGUMENTS: dict[str, Callable[[Node, Sizes], None]] = {
    **{f"aten.{name}.default": _result_sizes(1) for name in ["view", "reshape", "_unsafe_view", "expand"]},
    **{f"aten.{name}.default": _result_sizes(0) for name in ["full", "zeros", "ones"]},
    "aten.repeat.default": _repeats,
    "aten.repeat_interleave.self_int": _interleaved,
    **{f"aten.{name}.{overload}": _groups for name in ("conv1d", "conv2d") for overload in ("default", "padding")},
    "aten.split.Tensor": _split_size,
    "aten.split.sizes": _split_size,
    "aten.split_with_sizes.default": _split_size,
    "aten.unflatten.int": _unflatten_sizes,
    "aten.slice.Tensor": _slice_bounds,
}


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
