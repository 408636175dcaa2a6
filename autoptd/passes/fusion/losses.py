"""The head's GEMM and the cross-entropy of its logits: one operator that holds the logits of a few tokens at a time.

Their gradients are made with the loss, so that no logits are kept (the chunked losses of Liger Kernel). What stands between the
two may view and slice tokens; it moves before the GEMM.
"""

from __future__ import annotations

from dataclasses import replace

from torch.fx import Node

from autoptd.ir.notes import note, op_name, shape, value
from autoptd.passes.fusion.chain import ROW_VIEWS, Chain, Found, Refusal, is_op, rows
from autoptd.passes.links import argument

LEAST_BYTES = 8 << 20  # of a microbatch's logits: with less a loss in chunks is no faster (benchmarks/fusion.py)


def linear_cross_entropy(node: Node) -> Found:
    """cross_entropy(x W^T + bias, targets) over the last dim of the logits."""
    if op_name(node) != "aten.cross_entropy_loss":
        return None
    chain = Chain(node)
    logits, targets, *rest = node.args
    if len(shape(logits)) != 2:
        return Refusal("linear_cross_entropy", node, f"the classes are dim 1 of {len(shape(logits))}")
    if any(isinstance(one, Node) for one in rest) or isinstance(node.kwargs.get("weight"), Node):
        return Refusal("linear_cross_entropy", node, "its classes have weights")
    if value(targets).is_floating_point():
        return Refusal("linear_cross_entropy", node, "its targets are class probabilities")
    moved = []
    product = chain.uncast(logits)
    while is_op(product, *ROW_VIEWS, "aten.slice") and _keeps_classes(product):
        moved.append(product)
        chain.members.add(product)
        product = chain.uncast(product.args[0])
    if not chain.enter(product, "aten.linear"):
        what = note(product).conversion or op_name(product).removeprefix("aten.")
        return Refusal("linear_cross_entropy", node, f"its logits come from {what}")
    x, weight, *bias = product.args
    if argument(node, 3, "reduction", 1) == 0:
        return Refusal("linear_cross_entropy", node, "it gives a loss per token")
    tokens, width = rows(logits), shape(weight)[1]
    if tokens <= width:
        fact = (
            f"{tokens:,} tokens are no more than the width {width:,}: the head's gradient would take what its logits do"
        )
        return Refusal("linear_cross_entropy", node, fact)
    logits_bytes = value(logits).numel() * value(product).element_size()
    if logits_bytes < LEAST_BYTES:
        fact = (
            f"its logits take {logits_bytes / 1e6:.2g} MB: a loss in chunks is slower below {LEAST_BYTES / 1e6:.1f} MB"
        )
        return Refusal("linear_cross_entropy", node, fact)
    operands = (x, weight, targets, bias[0] if bias else None)
    return replace(chain.group("linear_cross_entropy", *operands), literals=node, moved=tuple(reversed(moved)))


def _keeps_classes(node: Node) -> bool:
    """Whether a view or slice leaves the last dim alone."""
    if is_op(node, "aten.slice"):
        return node.args[1] % len(shape(node)) != len(shape(node)) - 1
    return shape(node)[-1:] == shape(node.args[0])[-1:]
