"""Let attention read no mask where that proves to be causal (TRACED -> TRACED, where ranks divide queries).

In: a TRACED graph, and the trace with all samples that it is compared with. Out: both with `is_causal=True` in place of such
masks; where a mask proves to be a window, its size in the notes, for `windows.py`. A model that is traced may hand torch's
attention a mask of all tokens by all tokens (those of transformers do), though it is causal. Then the queries of a rank see the
keys before them, in whichever order ranks have tokens, and no rank makes that mask. Where tokens are not divided, fused
attention finds the same by itself (`fusion/attention.py`).

    read_causal(graph, ctx)
"""

from __future__ import annotations

from dataclasses import replace

from torch.fx import Graph

from autoptd.ir.notes import note, ops
from autoptd.passes.axes.constants import Constants
from autoptd.passes.axes.masks import causal_keywords, window_of
from autoptd.passes.context import Context
from autoptd.passes.runner import CALLS, Form, divides_values, graph_pass
from autoptd.passes.solve.queries import may_be_by_queries
from autoptd.passes.tokens.both_traces import divides_queries, drop_unread, second_trace


@graph_pass(takes=Form.TRACED, gives=Form.TRACED, when=divides_values, changes=(CALLS, "tokens"))
def read_causal(graph: Graph, ctx: Context) -> None:
    """Rewrite the attention of both traces where the masks of both are causal."""
    if not divides_queries(graph, ctx):
        return
    whole, constants = second_trace(graph, ctx), Constants(ctx.buffers)
    is_found = False
    for node, same in zip(list(ops(graph)), list(ops(whole)), strict=False):
        if not may_be_by_queries(node, ctx.mesh):
            continue
        keywords = [causal_keywords(one, constants) for one in (node, same)]
        if all(given is not None for given in keywords):
            is_found = True
            for one, given in zip((node, same), keywords, strict=True):
                one.args, one.kwargs = one.args[:3], given | {"is_causal": True}  # type: ignore[operator]
            continue
        windows = {window_of(one, constants) for one in (node, same)}
        if len(windows) == 1 and (window := windows.pop()) is not None:
            note(node).tokens = replace(note(node).tokens, window=window)
    if is_found:
        drop_unread(graph, whole)


__all__ = ["read_causal"]
