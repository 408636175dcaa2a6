"""What the rewrites of a TRACED graph share: they change the trace with all samples alike.

In: a TRACED graph and the context. Out: the second trace, as far as this run has rewritten it, in `ctx.found.whole`. The two
are compared operator by operator later (`samples.py`), so a rewrite happens in both or in neither.

    whole = second_trace(graph, ctx)
    ...                                 # the same in both
    drop_unread(graph, whole)
"""

from __future__ import annotations

from torch.fx import Graph, Node

from autoptd.ir.notes import copy_graph, op_name, ops
from autoptd.passes.context import Context
from autoptd.passes.solve.splits import ATTENTION, may_be_by_queries

# Attention, or a part of one that is written out.
SCORED = (ATTENTION, "aten.softmax", "aten._safe_softmax")


def second_trace(graph: Graph, ctx: Context) -> Graph:
    """Return the trace with all samples, to be rewritten; `graph` itself where there is only one.

    Other runs begin with the one in the context: the first rewrite of a run copies it.
    """
    if ctx.whole is None:
        return graph
    if ctx.found.whole is None:
        ctx.found.whole = copy_graph(ctx.whole)
    return ctx.found.whole


def divides_queries(graph: Graph, ctx: Context) -> bool:
    """Tell whether ranks may have some of the queries of any attention, written out or not."""
    return any(may_be_by_queries(node, ctx.mesh) for node in ops(graph) if op_name(node) in SCORED)


def drop_unread(*traces: Graph) -> None:
    """Remove the operators that nothing reads any more."""
    for trace in dict.fromkeys(traces):
        trace.eliminate_dead_code(is_kept)


def is_kept(node: Node) -> bool:
    """Tell whether a node stays even if nothing reads it."""
    return node.op in ("placeholder", "output")


__all__ = ["divides_queries", "drop_unread", "second_trace"]
