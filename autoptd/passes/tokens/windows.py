"""Let the queries of a rank read the keys in their window, and no mask (CONNECTED -> CONNECTED).

In: a graph with types over every axis, in which attention whose mask is proven to be a window says so (`causal_masks.py`). Out:
where it is split by its queries, the same without the mask. A rank with s/c queries under a window of w keys multiplies s/c + w
of them, not s, and makes no row of a mask. Without context-parallel ranks nothing changes.

    z = scaled_dot_product_attention(q, k, v, mask)     # mask: [1, 1, s/c, s]
    z = scaled_dot_product_attention(q, k, v, is_causal=True)   # and note(z).tokens.reads_window == w
"""

from __future__ import annotations

from dataclasses import replace

from torch.fx import Graph, Node

from autoptd.ir.notes import note, ops
from autoptd.ir.operators.record import QUERIES
from autoptd.passes.context import Context
from autoptd.passes.runner import CALLS, Form, divides_tokens, graph_pass
from autoptd.passes.tokens.both_traces import drop_unread


@graph_pass(takes=Form.CONNECTED, gives=Form.CONNECTED, when=divides_tokens, changes=(CALLS, "tokens"))
def read_windows(graph: Graph, ctx: Context) -> None:
    """Drop the masks that are windows where ranks split queries, and what makes them."""
    found = [node for node in ops(graph) if _is_by_window(node)]
    for node in found:
        note(node).tokens = replace(note(node).tokens, reads_window=note(node).tokens.window)
        keywords = {name: each for name, each in node.kwargs.items() if name in ("scale", "enable_gqa")}
        node.args, node.kwargs = node.args[:3], keywords | {"is_causal": True}
    if found:
        drop_unread(graph)
        left = set(graph.nodes)
        for assignment in ctx.found.assignments.values():
            for node in assignment.strategies.keys() - left:
                del assignment.strategies[node]


def _is_by_window(node: Node) -> bool:
    """Tell whether attention is split by runs of queries over one axis, of which a window is known."""
    record = note(node)
    axes = [axis for axis, form in record.forms.items() if form == QUERIES]
    if record.tokens.window is None or len(axes) != 1:
        return False
    # Places are counted in chunks of all queries, not of each of several blocks.
    return record.layout[axes[0]].atom == 0


__all__ = ["read_windows"]
