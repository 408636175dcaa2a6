"""Walk back along a pattern: find the operators that belong to it, and its operands.

In: the last operator of a possible pattern. Out: a `Group`, the fused operator that can replace it, or a `Refusal` with
the reason why it cannot. A `Chain` collects operators from the last one backwards; if there are several ways to
continue, each is tried on a copy.

    chain = Chain(node)
    if chain.enter(x, "aten.rsqrt"): ...        # x is an rsqrt, and now belongs to the pattern
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from torch.fx import Graph, Node

from autoptd.ir import markers
from autoptd.ir.fusion import Group, Operand
from autoptd.ir.notes import is_tensor, note, op_name, shape, value
from autoptd.ir.operators.table import operator_of


class Chain:
    """Operators from `last` backwards. `conversion`: one that was found instead of an operator of the pattern."""

    def __init__(self, last: Node) -> None:
        self.last = last
        self.members = {last}
        self.conversion: Node | None = None

    def copy(self) -> Chain:
        chain = Chain(self.last)
        chain.members = set(self.members)
        return chain

    def enter(self, node: Any, *names: str) -> bool:
        """Add `node` to the pattern if it is one of these operators; return whether it is."""
        if is_op(node, *names):
            self.members.add(node)
            return True
        # Ranks split this pattern: the refusal gives the reason of the first such conversion.
        if isinstance(node, Node) and node.target is markers.convert:
            self.conversion = self.conversion or node
        return False

    def uncast(self, node: Any) -> Any:
        """Follow casts from one floating dtype to another back to their operand, which may be `node` itself."""
        # Norms and softmaxes of half-precision models compute in float32 internally, and so do our kernels.
        while _is_cast(node) and is_tensor(node) and _is_floating(node) and _is_floating(node.args[0]):
            self.members.add(node)
            node = node.args[0]
        return node

    def scaled(self, node: Any) -> tuple[Any, float]:
        """Return (x, factor) with `node` = x * factor, through any products with and divisions by numbers."""
        factor = 1.0
        while is_op(node, "aten.mul", "aten.div") and len(node.args) == 2 and not node.kwargs:
            x, by = node.args
            # 0.125 * x, but not 1 / x.
            if number(x) is not None and is_op(node, "aten.mul"):
                x, by = by, x
            amount = number(by)
            # A division by 0 has no factor.
            if amount is None or not isinstance(x, Node) or not amount:
                break
            self.members.add(node)
            if isinstance(by, Node):
                self.members.add(by)
            factor = factor * amount if is_op(node, "aten.mul") else factor / amount
            node = x
        return node, factor

    def group(self, op: str, *operands: Operand, **keywords: Any) -> Group:
        """Return the pattern as a fused operator."""
        return Group(op, self.last, operands, frozenset(self.members), keywords)


def is_op(node: Any, *names: str) -> bool:
    return isinstance(node, Node) and node.op == "call_function" and op_name(node) in names


def number(arg: Any) -> float | None:
    """Return a literal number, or that of a filled tensor without dims; else None."""
    if isinstance(arg, (int, float)) and not isinstance(arg, bool):
        return float(arg)
    # For example torch.full([], -3.4e38) in masks.
    if is_op(arg, "aten.full") and not shape(arg):
        return number(arg.args[1])
    return None


def orders(node: Node) -> Iterator[tuple[Any, Any]]:
    """Yield the two operands of a product, or of a sum without a factor, in both orders."""
    if len(node.args) == 2 and not node.kwargs:
        yield node.args[0], node.args[1]
        yield node.args[1], node.args[0]


def last_dim(node: Node, dims: Any) -> bool:
    """Tell whether `dims` names the last dim of a value, and no other."""
    # softmax has one, mean a list, var a list or None.
    dims = [dims] if isinstance(dims, int) else list(dims or [])
    return len(dims) == 1 and dims[0] % len(shape(node)) == len(shape(node)) - 1


def splits(node: Node, *dims: int) -> bool:
    """Tell whether ranks split `node` along one of its `dims`, which may be negative."""
    positive = {dim % len(shape(node)) for dim in dims}
    return not positive.isdisjoint(note(node).layout.sharded_dims)


def same_dtype(*nodes: Node | None) -> bool:
    return len({value(node).dtype for node in nodes if node is not None}) == 1


def rows(node: Node) -> int:
    """Count the rows of a value: its entries over all dims but the last."""
    return math.prod(shape(node)[:-1])


def _is_cast(node: Any) -> bool:
    return isinstance(node, Node) and operator_of(node).moves == "cast"


def _is_floating(node: Any) -> bool:
    return isinstance(node, Node) and is_tensor(node) and value(node).is_floating_point()


def local_size(node: Node) -> tuple[int, ...]:
    """Return the shape of a value on a rank, in a LOCAL graph."""
    return tuple(note(node).local.shapes[0])


def erase_unread(graph: Graph, members: list[Node]) -> None:
    """Remove dead operators, and the operands that only they read."""
    # Last ones first: torch.fx refuses to erase a node that has readers.
    unread = sorted(set(members), reverse=True)
    while unread:
        node = unread.pop(0)
        if node.op == "call_function" and not node.users:
            read = node.all_input_nodes
            graph.erase_node(node)
            unread += [operand for operand in read if not operand.users and operand not in unread]
