"""Recognise operators that treat every row along dim 0 separately, such as those between expert matmuls.

In: a node, and which values have such rows. Out: the operands whose rows are those of its result, or None.

    rows_read(mul, {experts})       # [experts, weights]: experts * weights, row by row
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch.fx import Node

from autoptd.ir import markers
from autoptd.ir.notes import note, op_name, shape
from autoptd.ir.operators.record import Member, operands
from autoptd.ir.operators.table import links, operator_of

# A dim that is all of a tensor's dim 0.
ROWS = Member((0,))


def rows_read(node: Node, rows: Collection[Node]) -> list[Node] | None:
    """Return the operands that share the rows of the result, those in `rows` included; None if rows mix."""
    read = operands(node)
    if operator_of(node).is_random or set(rows).isdisjoint(read):
        return None
    if op_name(node) == "getitem":
        return read
    if node.target in markers.FUSED.values():
        return _fused_rows(node, rows)
    for link in links(node) or ():
        has_rows = link.out == ROWS and not (link.whole or link.mixes or link.segment or link.form)
        if has_rows and all(
            link.operands.get(number) in ((ROWS,) if operand in rows else (ROWS, None))
            for number, operand in enumerate(read)
        ):
            return [operand for number, operand in enumerate(read) if number in link.operands]
    return None


def _fused_rows(node: Node, rows: Collection[Node]) -> list[Node] | None:
    """Return the operands of a fused operator that compute entry by entry, or along the last dim."""
    if not isinstance(node.meta["val"], type(operands(node)[0].meta["val"])) or len(shape(node)) < 2:
        return None
    found = [operand for operand in operands(node) if len(shape(operand)) == len(shape(node))]
    is_by_row = op_name(node) in BY_ROW and all(shape(operand)[0] == shape(node)[0] for operand in found)
    return found if is_by_row and set(rows).intersection(operands(node)) <= set(found) else None


# Fused operators whose rows depend only on the same row of the operands.
BY_ROW = ("swiglu", "geglu", "gelu", "silu", "bias_gelu", "rms_norm", "layer_norm")


def experts_of(ids: Any) -> Any:
    """Return the values of ids, ignoring reshapes and type over an axis: a model may flatten twice."""
    while isinstance(ids, Node) and (ids.target is markers.convert or operator_of(ids).moves == "fold"):
        ids = ids.args[0]
    return ids


def looked_up(node: Node) -> Any:
    """Return the ids of a lookup `table[ids]` in a table made of parameters, else None."""
    if op_name(node) == "aten.index_select":
        table, dim, ids = node.args[:3]
        is_first = dim == 0
    elif op_name(node) == "aten.index":
        table, indices = node.args[:2]
        is_first = isinstance(indices, (list, tuple)) and len(indices) == 1
        ids = indices[0] if is_first else None  # type: ignore[index]
    else:
        return None
    has_rows = is_first and isinstance(ids, Node) and len(shape(ids)) == 1
    return ids if has_rows and note(table).of_params else None  # type: ignore[arg-type]


__all__ = ["BY_ROW", "ROWS", "experts_of", "looked_up", "rows_read"]
