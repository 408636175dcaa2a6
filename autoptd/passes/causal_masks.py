"""Let attention read no mask where that proves to be causal (first in TRACED -> ANNOTATED, where ranks divide tokens).

In: a TRACED graph, and the trace with all samples that it is compared with. Out: both with `is_causal=True` in place of such
masks. A model that is traced may hand torch's attention a mask of all tokens by all tokens (those of transformers do), though
it is causal. Then the queries of a rank see the keys before them, in whichever order ranks have tokens, and no rank makes that
mask. Where tokens are not divided, fused attention finds the same by itself (`fusion/attention.py`).

    ctx = read_causal(graph, ctx)
"""

from __future__ import annotations

from dataclasses import replace

from torch.fx import Graph, Node

from autoptd.ir.notes import copy_graph, ops
from autoptd.passes.axes.constants import Constants
from autoptd.passes.axes.masks import causal_keywords
from autoptd.passes.context import Context


def read_causal(graph: Graph, ctx: Context) -> Context:
    """Rewrite the attention of `graph`, and of the other trace in the context returned, where the masks of both are causal."""
    constants = Constants(ctx.buffers)
    whole = copy_graph(ctx.whole) if ctx.whole is not None else graph
    found = False
    for node, same in zip(list(ops(graph)), list(ops(whole)), strict=False):
        keywords = [causal_keywords(one, constants) for one in (node, same)]
        if all(given is not None for given in keywords):
            found = True
            for one, given in zip((node, same), keywords, strict=True):
                one.args, one.kwargs = one.args[:3], given | {"is_causal": True}  # type: ignore[operator]
    if not found:
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


__all__ = ["read_causal"]
