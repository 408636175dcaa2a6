"""Match attention written out: scale, mask, softmax, and the product with the values (Narayanan et al., SC'21, section
4.2).

If its probabilities have no other reader, all of it is one `attention` (torch's scaled_dot_product_attention);
otherwise scale, mask and softmax are one `masked_softmax`. A mask of constants alone is computed here: if it proves to
be causal (masks.py), no mask is read at all. The same holds for masks that a model passes to torch's operator.

Another mask goes to torch's operator only if it is known to leave every query a key: for a query that a finite mask
hides from all keys (such as padding), the operator's backward assumes probabilities of 1 each, but a softmax gives 1/n.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from autoptd.ir.fusion import Found, Refusal, Swapped
from autoptd.ir.notes import note, op_name, shape, value
from autoptd.passes.axes.constants import Constants
from autoptd.passes.axes.masks import Masked, causal_keywords, leaves_keys, proves_causal
from autoptd.passes.fusion.chain import Chain, is_op, last_dim, number, same_dtype, splits

PRODUCTS = ("aten.matmul", "aten.bmm")


@dataclass(frozen=True)
class Scores:
    """The operand of a softmax: `product` * `scale`, masked."""

    product: Node
    scale: float
    mask: Node | None
    causal: bool


def attention(node: Node, constants: Constants) -> Found:
    """Match softmax(q k^T * scale, masked) v, or torch's own attention with a mask that need not be read."""
    if op_name(node) == "aten.scaled_dot_product_attention":
        return _of_torch(node, constants)
    if op_name(node) not in PRODUCTS:
        return None
    chain = Chain(node)
    softmax, v = chain.uncast(node.args[0]), node.args[1]
    # torch's operator would draw its own dropout mask, which depends on the layout.
    is_dropped = is_op(softmax, "aten.dropout")
    if is_dropped and is_op(chain.uncast(softmax.args[0]), "aten.softmax", "aten._safe_softmax"):
        fact = "its probabilities drop out, by masks that do not depend on the layout"
        return Refusal("attention", node, fact)
    if not is_op(softmax, "aten.softmax") or not last_dim(softmax, softmax.args[1]):
        return None
    chain.members.add(softmax)
    scores = _scores(chain, chain.uncast(softmax.args[0]), constants)
    if isinstance(scores, str):
        return Refusal("attention", node, scores)
    if not chain.enter(scores.product, *PRODUCTS):
        return Refusal("attention", node, f"its scores are a {op_name(scores.product)}")
    q, key = scores.product.args
    # `q @ k.transpose(-2, -1)`: a product of any other two values is not attention.
    if not is_op(key, "aten.transpose", "aten.permute", "aten.t"):
        return Refusal("attention", node, "its keys do not come transposed")
    if any(len(shape(factor)) != 4 or shape(factor)[:-2] != shape(v)[:-2] for factor in (q, key)):
        fact = "queries, keys and values are not [batch, heads, tokens, size] alike"
        return Refusal("attention", node, fact)
    # A bool mask was refused with the scores: this one is added, in the dtype of the scores.
    if not same_dtype(node, q, key, v, scores.mask):
        return Refusal("attention", node, "its parts have several dtypes")
    if scores.mask is not None and not leaves_keys(scores.mask, constants):
        return Refusal("attention", node, "its mask may hide all keys of a query")
    if scores.scale <= 0:
        return Refusal("attention", node, f"its scale is {scores.scale:g}")
    k = key.args[0] if _swaps_last(key) else Swapped(key)
    return chain.group("attention", q, k, v, scores.mask, scale=scores.scale, causal=scores.causal)


def _of_torch(node: Node, constants: Constants) -> Found:
    q, k, v = node.args[:3]
    given = None if splits(q, -2) else causal_keywords(node, constants)
    if given is None:
        return None
    return Chain(node).group("attention", q, k, v, None, causal=True, **given)


def masked_softmax(node: Node, constants: Constants) -> Found:
    """Match softmax(scores * scale, masked), if the scores or the probabilities have other readers."""
    if op_name(node) not in ("aten.softmax", "aten.to", "aten._to_copy"):
        return None
    chain = Chain(node)
    softmax = chain.uncast(node)
    if not is_op(softmax, "aten.softmax") or not last_dim(softmax, softmax.args[1]):
        return None
    chain.members.add(softmax)
    inner = chain.uncast(softmax.args[0])
    scores = _scores(chain, inner, constants)
    if isinstance(scores, str):
        return Refusal("masked_softmax", node, scores)
    # A plain softmax: torch's own is one kernel.
    if scores.scale == 1.0 and scores.mask is None and not scores.causal:
        return None
    if value(node).dtype != value(scores.product).dtype:
        return Refusal(
            "masked_softmax", node, f"returns {value(node).dtype} for {value(scores.product).dtype}"
        )
    keywords: dict[str, Any] = {}
    if scores.scale != 1.0:
        keywords["scale"] = scores.scale
    if scores.causal:
        keywords["causal"] = True
    return chain.group("masked_softmax", scores.product, scores.mask, **keywords)


def _swaps_last(node: Node) -> bool:
    """Tell whether a node is the transpose of the last two dims of its operand."""
    size = len(shape(node))
    return is_op(node, "aten.transpose") and {dim % size for dim in node.args[1:3]} == {size - 1, size - 2}


def _scores(chain: Chain, node: Any, constants: Constants) -> Scores | str:
    """Return the operand of a softmax as its parts, or the reason why it cannot be fused."""
    mask: Node | None = None
    causal = False
    whole = node
    # Backwards: the last mask first, then the scale, then the product.
    while (found := _masked(chain, node)) is not None:
        if mask is not None or causal:
            return "it has several masks"
        # The kernel counts rows and columns from 0, which is wrong on a rank with only some of the tokens.
        causal = not splits(whole, -1, -2) and proves_causal(found, shape(whole), constants)
        if not causal and found.fill is not None:
            return "a mask fills scores in, but is not causal"
        if not causal and note(found.mask).needs_grad:
            return "its mask needs a gradient"
        if not causal:
            mask = found.mask
        node = chain.uncast(found.scores)
    product, scale = chain.scaled(node)
    product = chain.uncast(product)
    if shape(product) != shape(whole):
        return "its mask has dims that its scores lack"
    return Scores(product, scale, mask, causal)


def _masked(chain: Chain, node: Any) -> Masked | None:
    """Return the mask that was applied to scores last; None if `node` does not mask."""
    if is_op(node, "aten.add") and len(node.args) == 2 and not node.kwargs:
        a, b = node.args
        if not (isinstance(a, Node) and isinstance(b, Node)):
            return None
        # The scores are the operand that needs a gradient, or has more dims.
        if (note(b).needs_grad and not note(a).needs_grad) or len(shape(a)) < len(shape(b)):
            a, b = b, a
        # Adding a bool adds 1, so it is not a mask.
        if torch.bool in (value(a).dtype, value(b).dtype):
            return None
        chain.members.add(node)
        return Masked(a, b)
    if is_op(node, "aten.masked_fill") and number(node.args[2]) is not None:
        chain.members.add(node)
        return Masked(node.args[0], node.args[1], number(node.args[2]))
    if is_op(node, "aten.where") and len(node.args) == 3:
        mask, yes, no = node.args
        # where(mask, scores, -inf), or where(mask, -inf, scores).
        for scores, fill, hides in ((yes, no, False), (no, yes, True)):
            is_whole = isinstance(scores, Node) and value(scores).shape == value(node).shape
            if is_whole and number(fill) is not None and note(scores).needs_grad:
                chain.members.add(node)
                return Masked(scores, mask, number(fill), hides)
    return None


__all__ = ["attention", "masked_softmax"]
