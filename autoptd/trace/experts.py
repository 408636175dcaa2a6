"""Rewrite a mixture of experts that sorts its tokens as one product per row, without the sort.

In: a TRACED graph. Out: the same values without the sort. A mixture of experts groups the rows that chose the
same expert, and later restores their order; in between, every operator treats each row separately. So the
order does not matter: a grouped product becomes `expert_mm` of rows in token order, and samples stay
independent, as pipelines and replicas need.

    sorted, order = ids.sort()                          # [s], the expert of each row
    rows = x[order // k];  ends = histc(sorted).cumsum(0)
    y = grouped_mm(rows, weight, ends)                  # y = expert_mm(x of each choice, weight, ids)
    back = empty_like(order); back[order] = arange(s)
    out = y[back]                                       # out = y

The proof uses the graph alone: any other reader of sorted values keeps the sort, which is then refused by name.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from autoptd.ir.expert_mm import expert_mm
from autoptd.ir.notes import op_name, ops, shape
from autoptd.ir.operators.record import argument, operands
from autoptd.ir.operators.table import ROWS, links, operator_of
from autoptd.trace.new_nodes import Maker, put

aten = torch.ops.aten
# Products of rows, matrices and the ends of groups: ours, torch's, and the fallback of transformers.
PRODUCTS = ("autoptd.grouped_mm", "aten._grouped_mm", "transformers.grouped_mm_fallback")


class NotByRow(Exception):
    """Signal that a reader of sorted values may depend on their order."""


@dataclass
class Sort:
    """Collect a sort (or argsort) of expert ids and the values that depend on it.

    `sorted` has the ids in order; `rows` are values whose dim 0 is in that order; `starts` bring values into it,
    `ends` out of it; `products` are grouped by it. `known` are the other readers, which become unused.
    """

    node: Node
    ids: Node
    sorted: Node | None = None
    order: Node | None = None
    rows: set[Node] = field(default_factory=set)
    starts: list[Node] = field(default_factory=list)
    ends: list[Node] = field(default_factory=list)
    products: list[Node] = field(default_factory=list)
    known: set[Node] = field(default_factory=set)


def rewrite_experts(graph: Graph) -> None:
    """Rewrite all mixtures of experts in a graph that sort their tokens."""
    for node in list(ops(graph)):
        if op_name(node) not in ("aten.sort", "aten.argsort"):
            continue
        try:
            found = _follow(node)
        except NotByRow:
            continue
        if found.products:
            _rewrite(graph, found)
    graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))


def _follow(node: Node) -> Sort:
    """Follow sorted values until they are back in token order; NotByRow if the order may matter."""
    ids = node.args[0]
    if not isinstance(ids, Node) or len(shape(ids)) != 1 or argument(node, "descending"):
        raise NotByRow
    found = Sort(node, ids)
    if op_name(node) == "aten.argsort":
        found.order = node
    for piece in node.users if found.order is None else ():
        if piece.args[1]:
            found.order = piece
        else:
            found.sorted = piece
            found.rows.add(piece)
    if found.order is None:
        raise NotByRow
    found.known |= {node, found.order}
    for reader in _readers(found):
        _take(reader, found)
    return found


def _readers(found: Sort) -> Iterable[Node]:
    """Yield, in graph order, every node that reads sorted values or indices derived from the sort."""
    node = found.node.next
    while node.op != "root":
        read = set(node.all_input_nodes)
        if node not in found.rows and read & (found.rows | found.known):
            yield node
        node = node.next


def _take(node: Node, found: Sort) -> None:
    """Classify one reader; NotByRow if it is unknown."""
    if node in found.known:
        return
    name = op_name(node)
    if _is_start(node, found):
        found.starts.append(node)
        found.rows.add(node)
        if found.sorted is None and _is_same(node.args[0], found.ids):
            found.sorted = node
    elif name in PRODUCTS:
        x, _, ends = operands(node)[:3]
        if len(operands(node)) > 3 or x not in found.rows or not _are_ends(ends, found):
            raise NotByRow
        found.products.append(node)
        found.rows.add(node)
    elif name == "aten.index" and _index_of(node) is not None and _is_inverse(_index_of(node), found):
        if node.args[0] not in found.rows:
            raise NotByRow
        found.ends.append(node)
    elif name == "aten.index_add":
        if not _adds_choices(node, found):
            raise NotByRow
        found.ends.append(node)
    elif _tells_order(node, found):
        found.known.add(node)
    elif _is_by_row(node, found):
        found.rows.add(node)
    else:
        raise NotByRow


def _is_start(node: Node, found: Sort) -> bool:
    """Tell whether a node is x[order] or x[order // k], which sorts rows."""
    index = _index_of(node)
    if index is None or node.args[0] in found.rows | found.known:
        return False
    rows = shape(node.args[0])[0]  # type: ignore[arg-type]
    return rows * _choices_of(index, found) == len_of(found.ids)


def _choices_of(index: Node, found: Sort) -> int:
    """Return k if `index` is order // k, 1 if it is the order, else 0."""
    if index is found.order:
        return 1
    is_quotient = op_name(index) == "aten.floor_divide" or (
        op_name(index) == "aten.div" and index.kwargs.get("rounding_mode") in ("floor", "trunc")
    )
    if is_quotient and index.args[0] is found.order and isinstance(index.args[1], int):
        return index.args[1]
    return 0


def _index_of(node: Node) -> Node | None:
    """Return the one tensor that indexes dim 0."""
    if op_name(node) == "aten.index_select":
        return node.args[2] if node.args[1] == 0 else None  # type: ignore[return-value]
    if op_name(node) != "aten.index":
        return None
    indices = node.args[1]
    is_first = isinstance(indices, (list, tuple)) and len(indices) == 1 and isinstance(indices[0], Node)
    return indices[0] if is_first else None  # type: ignore[index, return-value]


def _is_inverse(index: Node | None, found: Sort) -> bool:
    """Tell whether an index is the inverse of the order: its argsort, or arange scattered by the order."""
    if index is None:
        return False
    if op_name(index) == "aten.argsort":
        return index.args[0] is found.order and not argument(index, "descending")
    if op_name(index) != "aten.index_put" or argument(index, "accumulate"):
        return False
    _, places, values = index.args[:3]
    is_placed = isinstance(places, (list, tuple)) and list(places) == [found.order]
    return is_placed and _is_arange(values, len_of(found.ids))


def _is_arange(node: Any, count: int) -> bool:
    if not isinstance(node, Node) or op_name(node) != "aten.arange":
        return False
    name = str(node.target)
    start, step = 0, 1
    if name == "aten.arange.default":
        (end,) = node.args
    else:
        start, end, *steps = node.args
        step = steps[0] if steps else 1
    return (start, end, step) == (0, count, 1)


def _are_ends(node: Node, found: Sort) -> bool:
    """Tell whether a value holds the end of each expert's rows: the cumsum of their counts."""
    node = _uncast(node)
    if op_name(node) != "aten.cumsum" or argument(node, "dim") not in (0, -1):
        return False
    counts = _uncast(node.args[0])
    experts = shape(node)[0]
    ids: Any = None
    if op_name(counts) == "aten.histc":
        bins = tuple(argument(counts, name) for name in ("bins", "min", "max"))
        ids = _uncast(counts.args[0]) if bins == (experts, 0, experts - 1) else None
    elif op_name(counts) == "aten.sum" and argument(counts, "dim") == [0]:
        chosen = _uncast(counts.args[0])
        is_choice = op_name(chosen) == "aten.one_hot" and argument(chosen, "num_classes") == experts
        ids = chosen.args[0] if is_choice else None
    return ids is not None and (ids is found.sorted or _is_same(ids, found.ids))


def _adds_choices(node: Node, found: Sort) -> bool:
    """Tell whether index_add adds the rows of each token's choices to zeros."""
    into, dim, index, rows = node.args[:4]
    if not isinstance(into, Node) or not isinstance(index, Node) or rows not in found.rows:
        return False
    is_zero = op_name(into) in ("aten.zeros", "aten.zeros_like")
    is_zero |= op_name(into) in ("aten.full", "aten.full_like") and argument(into, "fill_value") == 0
    choices = _choices_of(index, found)
    fits = choices > 0 and shape(into)[0] * choices == len_of(found.ids) and dim == 0
    return is_zero and fits and argument(node, "alpha") == 1


def _tells_order(node: Node, found: Sort) -> bool:
    """Tell whether a node only serves to compute starts, ends and groups."""
    if _choices_of(node, found) or _is_inverse(node, found) or _are_ends(node, found):
        return True
    # Only its shape is read, or its values are counted: its readers are checked as well.
    is_shape = op_name(node) in ("aten.empty_like", "aten.zeros_like") and node.args[0] is found.order
    is_count = op_name(node) == "aten.histc"
    is_cast = op_name(node) == "aten.to" and found.sorted in node.all_input_nodes
    return is_shape or is_count or (is_cast and all(op_name(user) == "aten.histc" for user in node.users))


def _is_by_row(node: Node, found: Sort) -> bool:
    """Tell whether each row of the result depends only on the same row of the sorted values."""
    read = operands(node)
    if found.known & set(read):
        return False
    if op_name(node) == "getitem":
        return read[0] in found.rows
    for link in links(node) or ():
        is_of_rows = link.out == ROWS and not (link.whole or link.mixes or link.segment)
        if is_of_rows and all(
            link.operands.get(number) == (ROWS if operand in found.rows else None)
            for number, operand in enumerate(read)
        ):
            return True
    return False


def _is_same(one: Any, other: Any) -> bool:
    """Tell whether two 1-d values have the same entries: a model may flatten twice."""
    return len(shape(one)) == len(shape(other)) and _unfolded(one) is _unfolded(other)


def _unfolded(node: Any) -> Any:
    while isinstance(node, Node) and operator_of(node).moves == "fold":
        node = node.args[0]
    return node


def _uncast(node: Any) -> Any:
    while isinstance(node, Node) and op_name(node) == "aten.to":
        node = node.args[0]
    return node


def len_of(node: Node) -> int:
    return shape(node)[0]


def _rewrite(graph: Graph, found: Sort) -> None:
    """Rewrite the products to keep every row at its token's position."""
    if found.sorted is not None and found.sorted not in found.starts:
        found.sorted.replace_all_uses_with(found.ids)
    for node in found.starts:
        x, index = node.args[0], _index_of(node)
        assert isinstance(x, Node) and index is not None
        count = _choices_of(index, found)
        if count > 1:
            sizes = shape(x)
            make = Maker(node)
            x = make(aten.unsqueeze.default, x, 1)
            x = make(aten.expand.default, x, [sizes[0], count, *sizes[1:]])
            x = make(aten.reshape.default, x, [sizes[0] * count, *sizes[1:]])
        put(node, x)
    for node in found.products:
        x, weight = node.args[:2]
        put(node, Maker(node)(expert_mm._opoverload, x, weight, found.ids))
    for node in found.ends:
        rows = node.args[0]
        if op_name(node) == "aten.index_add":
            into, _, _, rows = node.args[:4]
            assert isinstance(rows, Node)
            sizes, tokens = shape(rows), shape(into)[0]  # type: ignore[arg-type]
            make = Maker(node)
            rows = make(aten.reshape.default, rows, [tokens, sizes[0] // tokens, *sizes[1:]])
            rows = make(aten.sum.dim_IntList, rows, [1])
        put(node, rows)
