"""Which operators a picture shows: those that do more than rearrange a value.

view       an operator that only rearranges (view, transpose, split, ...): not shown, edges pass through it.
hidden     besides views: a conversion of a parameter that moves nothing; its reader shows it.
origin     the shown operator or the placeholder behind any hidden ones.

    is_shown(linear), is_shown(transpose)       # True, False
    origin(transpose)                           # linear
"""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import Node

from autoptd.ir import markers
from autoptd.ir.notes import is_tensor, note, op_name
from autoptd.ir.operators.table import operator_of
from autoptd.ir.types import CONVERSIONS

SHOWN_MOVES = ("", "part", "cast")  # what computes, takes a part of its operand, or changes its dtype
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")
COMMUNICATES = {row.name for row in CONVERSIONS.values() if {row.forward, row.backward} & set(COLLECTIVES)}


def short_op(node: Node) -> str:
    """Return `linear` for `aten.linear`."""
    return op_name(node).removeprefix("aten.")


def is_shown(node: Node) -> bool:
    """Tell whether an operator is drawn: neither a view nor a local conversion of a parameter."""
    return is_tensor(node) and operator_of(node).moves in SHOWN_MOVES and not _is_shown_by_reader(node)


def origin(node: Node) -> Node:
    """Return the shown operator or the placeholder that `node` is a view of."""
    # A view has one operand that is a tensor of its own: the first.
    while node.op == "call_function" and not is_shown(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def hidden_inputs(node: Node) -> Iterator[Node]:
    """Yield the hidden operators between a shown one and the origins of its operands."""
    for arg in node.all_input_nodes:
        while arg.op == "call_function" and not is_shown(arg) and arg.all_input_nodes:
            yield arg
            arg = arg.all_input_nodes[0]


def _is_shown_by_reader(node: Node) -> bool:
    if node.target not in (markers.convert, markers.share) or note(node).conversion in COMMUNICATES:
        return False
    # Of an activation, even a local change of type is drawn: it explains what comes next.
    return origin(node.all_input_nodes[0]).op == "placeholder"


__all__ = ["COLLECTIVES", "COMMUNICATES", "hidden_inputs", "is_shown", "origin", "short_op"]
