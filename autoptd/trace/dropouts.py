"""Normalise dropout in a traced graph: remove idle ones, decompose attention with dropout, number the sites.

A dropout that stays is `aten.dropout(x, rate, True)` with 0 < rate < 1. Its mask is drawn at run time from the
number of its site: 0, 1, 2 ... in the order in which the model calls dropout. Fused attention with dropout is
decomposed into scores, mask, softmax, dropout and values, because the random numbers of a fused kernel depend
on the layout.

    rewrite_dropouts(graph);  [note(node).draw.site for node in dropouts(graph)]     # [0, 1, 2, ...]
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph, Node

from autoptd.errors import PlanError
from autoptd.ir.notes import Note, Origin, note, op_name, ops, set_note, shape, site, value
from autoptd.trace.new_nodes import Maker, put

aten = torch.ops.aten
NAME = "aten.dropout"
OTHERS = ("aten.feature_dropout", "aten.alpha_dropout", "aten.feature_alpha_dropout")
ATTENTION = "aten.scaled_dot_product_attention"
UNFUSED = "unfused: exact dropout"


def dropouts(graph: Graph) -> Iterator[Node]:
    """Yield the dropouts of a normalised graph, in order."""
    return (node for node in ops(graph) if op_name(node) == NAME)


def rewrite_dropouts(graph: Graph) -> None:
    """Remove dropouts without effect and decompose attention with dropout; `noise.py` numbers the sites.

    PlanError for other kinds of dropout.
    """
    futures: dict[tuple[int, int], Node] = {}
    for node in list(ops(graph)):
        if op_name(node) in OTHERS and drops(node):
            fact = f"{op_name(node)} draws other masks than one number per element"
            raise PlanError(site(node), fact, "nn.Dropout, or p=0")
        if op_name(node) in (NAME, *OTHERS):
            _rewrite_dropout(graph, node)
        elif op_name(node) == ATTENTION and _attention_rate(node):
            _unfuse(graph, node, futures)


def drops(node: Node) -> bool:
    """Tell whether a dropout of any kind changes its operand."""
    return bool(node.args[1]) and bool(node.args[2])


def _attention_rate(node: Node) -> float:
    return node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)


def _rewrite_dropout(graph: Graph, node: Node) -> None:
    if not drops(node):
        put(node, node.args[0])
    # A rate of 1 draws nothing: the result is 0.
    elif node.args[1] == 1:
        node.target, node.args = aten.mul.Tensor, (node.args[0], 0.0)


def _unfuse(graph: Graph, node: Node, futures: dict[tuple[int, int], Node]) -> None:
    """Write attention out as softmax(scale * q k^T, masked) with dropout, times v.

    `futures` are causal masks by size, made once for the graph.
    """
    q, k, v, *rest = node.args
    given = dict(zip(("attn_mask", "dropout_p", "is_causal"), rest, strict=False)) | node.kwargs
    mask, scale = given.get("attn_mask"), given.get("scale")
    size = (shape(q)[-2], shape(k)[-2])
    if given.get("is_causal") and size not in futures:
        futures[size] = _future(graph, size, q)
    make = Maker(node)

    def call(name: str, target: Any, *args: Any) -> Node:
        made = make(target, *args)
        note(made).origin = Origin(name=name)
        return made

    if given.get("enable_gqa") and shape(q)[-3] != shape(k)[-3]:
        times = shape(q)[-3] // shape(k)[-3]
        k, v = (
            call(name, aten.repeat_interleave.self_int, heads, times, -3)
            for name, heads in (("k", k), ("v", v))
        )
    scaled = call("q", aten.mul.Tensor, q, scale if scale is not None else shape(q)[-1] ** -0.5)
    scores = call("scores", aten.matmul.default, scaled, call("k", aten.transpose.int, k, -2, -1))
    if given.get("is_causal"):
        scores = call("scores", aten.masked_fill.Scalar, scores, futures[size], float("-inf"))
    elif mask is not None and value(mask).dtype == torch.bool:
        hidden = call("hidden", aten.logical_not.default, mask)
        scores = call("scores", aten.masked_fill.Scalar, scores, hidden, float("-inf"))
    elif mask is not None:
        scores = call("scores", aten.add.Tensor, scores, mask)
    # A mask may leave a row without keys: its probabilities are zeros, not NaN, as in the fused operator.
    softmax = aten._safe_softmax.default if mask is not None else aten.softmax.int
    probabilities = call("probabilities", softmax, scores, -1)
    dropped = call("probabilities", aten.dropout.default, probabilities, given["dropout_p"], True)
    note(dropped).reason = UNFUSED
    _rewrite_dropout(graph, dropped)
    put(node, make(aten.matmul.default, dropped, v))


def _future(graph: Graph, size: tuple[int, int], like: Any) -> Node:
    """Return the mask of the keys that causal attention hides, created before all operators."""
    with graph.inserting_before(next(ops(graph))):
        ones = graph.call_function(aten.ones.default, (list(size),), {"dtype": torch.bool})
    ones.meta["val"] = value(like).new_ones(size, dtype=torch.bool)
    set_note(ones, Note())
    return Maker(ones, ones.next, Note(origin=Origin(name="future")))(aten.triu.default, ones, 1)
