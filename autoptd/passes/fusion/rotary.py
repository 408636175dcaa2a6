"""Rotary position embedding: `x * cos + rotate_half(x) * sin`, with halves (Llama, NeoX) or neighbours (GPT-J) rotated."""

from __future__ import annotations

import itertools
from typing import Any

from torch.fx import Node

from autoptd.ir.fusion import Found, Refusal
from autoptd.ir.notes import note, op_name, shape
from autoptd.passes.fusion.chain import Chain, is_op, last_dim, orders, same_dtype, splits

# (start, end, step) along the last dim.
Piece = tuple[int, int, int]


def rotary(node: Node) -> Found:
    """Match the sum of a value times its cosines and the rotated value times its sines."""
    if op_name(node) != "aten.add" or not all(is_op(term, "aten.mul") for term in node.args):
        return None
    # Eight ways to read (a * b) + (c * d); in one of them a factor is the rotated half of another.
    for straight, turned in orders(node):
        for (x, cos), (half, sin) in itertools.product(orders(straight), orders(turned)):
            chain = Chain(node)
            chain.members |= {straight, turned}
            is_interleaved = _rotation(chain, half, x)
            if is_interleaved is None or not (isinstance(cos, Node) and isinstance(sin, Node)):
                continue
            refused = _why_not(node, x, cos, sin)
            if refused:
                return Refusal("rotary", node, refused)
            keywords = {"interleaved": True} if is_interleaved else {}
            return chain.group("rotary", x, cos, sin, **keywords)
    return None


def _why_not(node: Node, x: Node, cos: Node, sin: Node) -> str:
    """Return the reason why a rotation cannot be fused; "" if it can."""
    if shape(cos) != shape(sin) or shape(cos)[-1:] != shape(x)[-1:]:
        return "its cosines and sines are not of one shape, as wide as what is turned"
    if note(cos).needs_grad or note(sin).needs_grad:
        return "the angles need a gradient"
    # Element i is paired with i + d/2 of the same head: both must be on one rank.
    if splits(x, -1):
        return "what is rotated is split"
    if not same_dtype(node, x, cos, sin):
        return "its parts have several dtypes"
    return ""


def _rotation(chain: Chain, node: Any, x: Any) -> bool | None:
    """Return False if `node` is cat(-x2, x1) of the halves of x, True if it is (-x1, x0, -x3, x2, ...), else None."""
    if not isinstance(x, Node) or not shape(x):
        return None
    size, half = shape(x)[-1], shape(x)[-1] // 2
    # torch.cat((-x[..., half:], x[..., :half]), -1)
    if is_op(node, "aten.cat"):
        pieces = _negated_and_plain(chain, node, x)
        if pieces == ((half, 2 * half, 1), (0, half, 1)):
            chain.members |= {node, node.args[0][0]}
            return False
    # torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    is_fold = is_op(node, "aten.view", "aten.reshape", "aten.flatten", "aten._unsafe_view")
    if is_fold and is_op(node.args[0], "aten.stack"):
        stack = node.args[0]
        pieces = _negated_and_plain(chain, stack, x)
        if pieces == ((1, size, 2), (0, size, 2)) and shape(node) == shape(x):
            chain.members |= {node, stack, stack.args[0][0]}
            return True
    return None


def _negated_and_plain(chain: Chain, node: Node, x: Node) -> tuple[Piece | None, Piece | None] | None:
    """Return the pieces (a, b) of x where `node` is the cat or stack of (-a, b) on the last dim; else None."""
    parts: Any = node.args[0]
    dim = node.args[1] if len(node.args) > 1 else 0
    if len(parts) != 2 or not last_dim(node, dim) or not is_op(parts[0], "aten.neg"):
        return None
    plain = _piece(chain, parts[1], x)
    return _piece(chain, parts[0].args[0], x), plain


def _piece(chain: Chain, node: Any, x: Node) -> Piece | None:
    """Return (start, end, step) of the part of the last dim of `x` that `node` is, or None."""
    size = shape(x)[-1]
    if is_op(node, "aten.slice") and node.args[0] is x:
        dim, start, end, step = (*node.args[1:], *(0, None, None, 1)[len(node.args) - 1 :])
        if not last_dim(x, dim):
            return None
        chain.members.add(node)
        # Python's own rules, -1 and ends beyond the size included.
        return slice(start, end, step).indices(size)
    # Two halves of torch.chunk, or of split.
    if is_op(node, "getitem") and is_op(node.args[0], "aten.split", "aten.chunk", "aten.split_with_sizes"):
        split = node.args[0]
        if split.args[0] is x and len(split.users) == 2 and shape(node)[-1] * 2 == size:
            chain.members |= {node, split}
            return node.args[1] * size // 2, (node.args[1] + 1) * size // 2, 1
    return None
