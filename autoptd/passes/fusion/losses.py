"""Fuse the head's GEMM and the cross-entropy of its logits into an operator that holds the logits of a few tokens at a
time.

Gradients are computed with the loss, so no logits are saved (the chunked losses of Liger Kernel). Operators between the
two may view and slice tokens; they move before the GEMM.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch.fx import Graph, Node

from autoptd.ir import markers
from autoptd.ir.fusion import CHUNK_ROWS, Found, Group, Refusal
from autoptd.ir.notes import Local, note, op_name, set_note, shape, value
from autoptd.ir.operators.record import argument
from autoptd.ir.operators.table import operator_of, says_shape
from autoptd.passes.fusion.chain import Chain, is_op, local_size, rows

# If the logits of a microbatch take less, a loss in chunks is not faster (benchmarks/fusion.py).
MIN_LOGITS_BYTES = 8 << 20


def linear_cross_entropy(node: Node) -> Found:
    """Match cross_entropy(x W^T + bias, targets) over the last dim of the logits."""
    if op_name(node) != "aten.cross_entropy_loss":
        return None
    chain = Chain(node)
    logits, targets, *rest = node.args
    if len(shape(logits)) != 2:
        return Refusal("linear_cross_entropy", node, f"the classes are dim 1 of {len(shape(logits))}")
    if any(isinstance(arg, Node) for arg in rest) or isinstance(node.kwargs.get("weight"), Node):
        return Refusal("linear_cross_entropy", node, "its classes have weights")
    # `logits[:, :-1].reshape(-1, vocab)` may come before the GEMM: x[:, :-1].reshape(-1, hidden).
    moved = []
    product = chain.uncast(logits)
    while _moves_rows(product) and _keeps_classes(product):
        moved.append(product)
        chain.members.add(product)
        product = chain.uncast(product.args[0])
    if not chain.enter(product, "aten.linear"):
        what = note(product).conversion or op_name(product).removeprefix("aten.")
        return Refusal("linear_cross_entropy", node, f"its logits come from {what}")
    if argument(node, "reduction") == 0:
        return Refusal("linear_cross_entropy", node, "it returns a loss per token")
    loss_in_full = _why_in_full(logits, product)
    if loss_in_full:
        return Refusal("linear_cross_entropy", node, loss_in_full)
    x, weight, *bias = product.args
    group = chain.group("linear_cross_entropy", x, weight, targets, bias[0] if bias else None)
    return replace(group, literals=node, moved=tuple(reversed(moved)))


def _why_in_full(logits: Node, product: Node) -> str:
    """Return why a loss in chunks would save nothing, or would be slower; "" if it is worth it."""
    weight, itemsize = product.args[1], value(product).element_size()
    tokens, width = rows(logits), shape(weight)[1]  # type: ignore[arg-type]
    # Saved for backward are, for every class, the logits of all tokens, or the weight's gradient, which
    # accumulates in float32.
    times = max(1, 4 // itemsize)
    if note(weight).needs_grad and tokens <= times * width:  # type: ignore[arg-type]
        least = f"the width {width:,}" if times == 1 else f"{times} times the width {width:,}"
        fact = f"{tokens:,} tokens do not exceed {least}: "
        return fact + "the head's gradient would take as much memory as its logits"
    logits_bytes = value(logits).numel() * itemsize
    if logits_bytes < MIN_LOGITS_BYTES:
        taken, least = f"{logits_bytes / 1e6:.2g} MB", f"{MIN_LOGITS_BYTES / 1e6:.1f} MB"
        return f"its logits take {taken}: a loss in chunks is slower below {least}"
    return ""


def _moves_rows(node: Any) -> bool:
    """Tell whether a node is a view or slice of the rows of a table."""
    return isinstance(node, Node) and (
        is_op(node, "aten.slice", "aten.contiguous") or operator_of(node).moves == "fold"
    )


def _keeps_classes(node: Node) -> bool:
    """Tell whether a view or slice leaves the last dim alone."""
    if is_op(node, "aten.slice"):
        return node.args[1] % len(shape(node)) != len(shape(node)) - 1
    return shape(node)[-1:] == shape(node.args[0])[-1:]


def in_chunks(
    graph: Graph, group: Group, operands: tuple[Any, ...], most: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the operands and keywords of the fused operator, whose chunks of logits take at most `most` bytes.

    Views between GEMM and loss are moved before the GEMM.
    """
    x, weight, targets, bias = operands
    for view in group.moved:
        record = note(view)
        # The view's rows, with the hidden width instead of the vocabulary.
        size = (*local_size(view)[:-1], local_size(x)[-1])
        args = (x, list(size)) if says_shape(view) else (x, *view.args[1:])
        with graph.inserting_before(group.result):
            made = graph.call_function(view.target, args, view.kwargs)
        # In the dtype of x: a cast may stand between the GEMM and the view.
        made.meta["val"] = value(x).new_empty((*shape(view)[:-1], shape(x)[-1]))
        moved = replace(record.bare(), layout=note(x).layout, dims=(), why="", forms={}, axis="")
        set_note(made, moved).local = Local([size], shape(made))
        x = made
    loss = group.literals
    keywords = dict(loss.kwargs)
    if loss.target is not markers.cross_entropy:
        keywords = _loss_keywords(loss)
    keywords["dtype"] = None if value(loss).dtype == value(x).dtype else value(loss).dtype
    keywords["chunk"] = chunk_of(local_size(x)[0], local_size(weight)[0] * value(x).element_size(), most)
    # `hook_gemms` may set it.
    keywords["wgrad"] = ""
    return (x, targets, weight, bias), keywords


def _loss_keywords(loss: Node) -> dict[str, Any]:
    """Return the keywords of a plain cross-entropy, as its marker has them."""
    return {
        "reduction": ("none", "mean", "sum")[argument(loss, "reduction")],
        "ignore_index": argument(loss, "ignore_index"),
        "label_smoothing": argument(loss, "label_smoothing"),
        "vocab": False,
        "size": 0,
        "total": -1,
    }


def chunk_of(tokens: int, token_bytes: int, most: int) -> int:
    """Return the tokens of a chunk: equal chunks of at most `most` bytes, or of `CHUNK_ROWS` tokens."""
    at_once = max(CHUNK_ROWS, most // token_bytes)
    # 10,000 tokens with at most 4,096 at once: three chunks of 3,334, rather than 4,096 and a remainder.
    chunks = -(-tokens // at_once)
    return -(-tokens // chunks)
