"""Rewrite a model for ranks that divide its tokens (first in TRACED -> ANNOTATED).

In: a TRACED graph, and the trace with all samples that it is compared with. Out: both, rewritten alike: attention that is
written out is one operator (`raise_attention.py`), it reads no mask that is causal (`causal_masks.py`), and losses of shifted
labels read the logits of all tokens (`shift.py`). Without context-parallel ranks nothing changes.

    ctx = rewrite_for_tokens(graph, ctx)
"""

from __future__ import annotations

from dataclasses import replace

from torch.fx import Graph, Node

from autoptd.ir.notes import copy_graph
from autoptd.passes.causal_masks import read_causal
from autoptd.passes.context import Context
from autoptd.passes.raise_attention import raise_attention
from autoptd.passes.shift import keep_tokens


def rewrite_for_tokens(graph: Graph, ctx: Context) -> Context:
    """Rewrite `graph`; return the context, which has the other trace rewritten where anything was."""
    if not ctx.mesh.token_axes:
        return ctx
    whole = copy_graph(ctx.whole) if ctx.whole is not None else graph
    done = [rewrite(graph, whole, ctx) for rewrite in (raise_attention, read_causal, keep_tokens)]
    if not any(done):
        return ctx
    for trace in dict.fromkeys((graph, whole)):
        trace.eliminate_dead_code(_is_kept)
    if ctx.whole is None:
        return ctx
    rewritten = replace(ctx, whole=whole)
    # What is found with it is found for the one that was given.
    object.__setattr__(rewritten, "found", ctx.found)
    return rewritten


def _is_kept(node: Node) -> bool:
    return node.op in ("placeholder", "output")


__all__ = ["rewrite_for_tokens"]
