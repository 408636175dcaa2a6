"""Rotary position embedding: `x * cos + rotate_half(x) * sin`, with halves (Llama, NeoX) or neighbours (GPT-J) rotated."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from autoptd.ir.notes import note, op_name, shape
from autoptd.passes.fusion.chain import Chain, Found, Refusal, is_op, orders, same_dtype, splits


def rotary(node: Node) -> Found:
    """Match the sum of a value times its cosines and the rotated value times its sines."""
    if op_name(node) != "aten.add" or not all(is_op(term, "aten.mul") for term in node.args):
        return None
    for straight, turned in orders(node):
        for x, cos in orders(straight):
            for half, sin in orders(turned):
                chain = Chain(node)
                chain.members |= {straight, turned}
                interleaved = _rotation(chain, half, x)
                if interleaved is None or not (isinstance(cos, Node) and isinstance(sin, Node)):
                    continue
                if shape(cos) != shape(sin) or shape(cos)[-1:] != shape(x)[-1:]:
                    return Refusal(
                        "rotary",
                        node,
                        "its cosines and sines are not of one shape, as wide as what is turned",
                    )
                if note(cos).needs_grad or note(sin).needs_grad:
                    return Refusal("rotary", node, "the angles need a gradient")
                if splits(x, -1):
                    return Refusal("rotary", node, "what is rotated is split")
                if not same_dtype(node, x, cos, sin):
                    return Refusal("rotary", node, "its parts have several dtypes")
                return chain.group("rotary", x, cos, sin, **({"interleaved": True} if interleaved else {}))
    return None


def _rotation(chain: Chain, node: Any, x: Any) -> bool | None:
    """Return False if `node` is cat(-x2, x1) of the halves of x, True if it is (-x1, x0, -x3, x2, ...), else None."""
    if not isinstance(x, Node):
        return None
    if is_op(node, "aten.cat"):
        parts, dim = node.args[0], node.args[1] if len(node.args) > 1 else 0
        if len(parts) == 2 and dim % len(shape(node)) == len(shape(node)) - 1 and is_op(parts[0], "aten.neg"):
            first, second = _piece(chain, parts[1], x), _piece(chain, parts[0].args[0], x)
            half = shape(x)[-1] // 2
            if first == (0, half, 1) and second == (half, 2 * half, 1):
                chain.members |= {node, parts[0]}
                return False
    if is_op(node, "aten.view", "aten.reshape", "aten.flatten", "aten._unsafe_view") and is_op(
        node.args[0], "aten.stack"
    ):
        stack = node.args[0]
        parts, dim = stack.args[0], stack.args[1] if len(stack.args) > 1 else 0
        if (
            len(parts) == 2
            and dim % len(shape(stack)) == len(shape(stack)) - 1
            and is_op(parts[0], "aten.neg")
        ):
            even, odd = _piece(chain, parts[1], x), _piece(chain, parts[0].args[0], x)
            size = shape(x)[-1]
            if even == (0, size, 2) and odd == (1, size, 2) and shape(node) == shape(x):
                chain.members |= {node, stack, parts[0]}
                return True
    return None


def _piece(chain: Chain, node: Any, x: Node) -> tuple[int, int, int] | None:
    """Return (start, end, step) of the part of the last dim of `x` that `node` is, or None."""
    size = shape(x)[-1]
    if is_op(node, "aten.slice") and node.args[0] is x:
        dim, start, end, step = (*node.args[1:], *(0, None, None, 1)[len(node.args) - 1 :])
        if dim % len(shape(x)) != len(shape(x)) - 1:
            return None
        chain.members.add(node)
        start, end = (start or 0), size if end is None else min(end, size)
        return (start + size if start < 0 else start), (end + size if end < 0 else end), step
    if is_op(node, "getitem") and is_op(node.args[0], "aten.split", "aten.chunk", "aten.split_with_sizes"):
        split = node.args[0]
        if split.args[0] is x and len(split.users) == 2 and shape(node)[-1] * 2 == size:
            chain.members |= {node, split}
            return node.args[1] * size // 2, (node.args[1] + 1) * size // 2, 1
    return None
