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
from autoptd.ir.types import CONVERSIONS

VIEWS = frozenset(
    "view reshape _unsafe_view flatten unflatten squeeze unsqueeze transpose permute t contiguous clone alias detach"
    " expand split split_with_sizes chunk unbind getitem".split()
)
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")
COMMUNICATES = {row.name for row in CONVERSIONS.values() if {row.forward, row.backward} & set(COLLECTIVES)}


def short_op(node: Node) -> str:
    """Return `linear` for `aten.linear`."""
    return op_name(node).removeprefix("aten.")


def is_shown(node: Node) -> bool:
    """Tell whether an operator is drawn: neither a view nor a local conversion of a parameter."""
    return is_tensor(node) and short_op(node) not in VIEWS and not _is_shown_by_reader(node)


def origin(node: Node) -> Node:
    """Return the shown operator or the placeholder that `node` is a view of."""
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
    return origin(node.all_input_nodes[0]).op == "placeholder"


__all__ = ["COLLECTIVES", "COMMUNICATES", "VIEWS", "hidden_inputs", "is_shown", "origin", "short_op"]
