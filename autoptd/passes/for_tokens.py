"""Rewrite a model for ranks that divide its tokens (first in TRACED -> ANNOTATED).

In: a TRACED graph, and the trace with all samples that it is compared with. Out: both, rewritten alike: attention that is
written out is one operator (`raise_attention.py`), masks that are causal or a window are known (`causal_masks.py`), and losses
of shifted labels read the logits of all tokens (`shift.py`). Without context-parallel ranks only attention changes, and only
such as has heads that t does not divide: tensor ranks may divide its queries (`solve/queries.py`).

    ctx = rewrite_for_tokens(graph, ctx)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch.fx import Graph, Node

from autoptd.ir.notes import copy_graph, op_name, ops
from autoptd.passes.causal_masks import read_causal
from autoptd.passes.context import Context
from autoptd.passes.copy_heads import copy_heads
from autoptd.passes.raise_attention import raise_attention
from autoptd.passes.shift import keep_tokens
from autoptd.passes.solve.queries import ATTENTION, may_be_by_queries

# Attention, or a part of one that is written out.
SCORED = (ATTENTION, "aten.softmax", "aten._safe_softmax")
# Of both traces alike; tells whether it changed anything.
Rewrite = Callable[[Graph, Graph, Context], bool]


def rewrite_for_tokens(graph: Graph, ctx: Context) -> Context:
    """Rewrite `graph`; return the context, which has the other trace rewritten where anything was."""
    scored = [node for node in ops(graph) if op_name(node) in SCORED]
    rewrites: list[Rewrite] = []
    if any(may_be_by_queries(node, ctx.mesh) for node in scored):
        rewrites = [raise_attention, read_causal]
    if ctx.mesh.token_axes:
        rewrites += [keep_tokens, copy_heads]
    whole = copy_graph(ctx.whole) if rewrites and ctx.whole is not None else graph
    done = [rewrite(graph, whole, ctx) for rewrite in rewrites]
    if not any(done):
        return ctx
    for trace in dict.fromkeys((graph, whole)):
        trace.eliminate_dead_code(is_kept)
    if ctx.whole is None:
        return ctx
    rewritten = replace(ctx, whole=whole)
    # What is found with it is found for the one that was given.
    object.__setattr__(rewritten, "found", ctx.found)
    return rewritten


def is_kept(node: Node) -> bool:
    """Tell whether a node stays, though nothing reads it."""
    return node.op in ("placeholder", "output")


__all__ = ["is_kept", "rewrite_for_tokens"]
