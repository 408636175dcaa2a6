"""Give every collective of a program to the node of its LOCAL graph that makes it.

In: a `Program` with graphs. Out: the collectives per (node, stage), and those that no node makes: what
travels between stages, and what comes once a step. Together they are `program.collectives`, each once.

    made, others = calls_of_nodes(program)
    made[convert_24, 0][0].forward          # "all-reduce"
"""

from __future__ import annotations

from collections import deque
from itertools import chain

from torch.fx import Node

from autoptd.ir import markers
from autoptd.ir.notes import note, op_name, ops
from autoptd.program.program import Program
from autoptd.program.specs import Collective

Calls = dict[tuple[Node, int], tuple[Collective, ...]]


def calls_of_nodes(program: Program) -> tuple[Calls, list[Collective]]:
    """Return what each node communicates, by node and stage, and the rest.

    Several collectives may have one site (a loop in the model): they go to its nodes in graph order.
    """
    # Collectives are listed by site, nodes by graph: in a loop both come in the same order.
    waiting: dict[tuple[str, int, str], deque[int]] = {}
    for i, call in enumerate(program.collectives):
        waiting.setdefault((call.site, call.stage, call.conversion), deque()).append(i)
    calls: Calls = {}
    for node in ops(program.graphs["LOCAL"]):
        for stage in note(node).stages:
            queues = [waiting.get((site, stage, conversion)) for site, conversion in _sites(node)]
            taken = [queue.popleft() for queue in queues if queue]
            if taken:
                calls[node, stage] = tuple(program.collectives[i] for i in taken)
    left = sorted(chain.from_iterable(waiting.values()))
    return calls, [program.collectives[i] for i in left]


def _sites(node: Node) -> list[tuple[str, str]]:
    """Return (site, conversion) of what a node may communicate, as the compiler names them."""
    record = note(node)
    here = f"{record.module} ({record.source})"
    if record.conversion:
        # A value that is not kept for backward is gathered a second time, at the same site.
        again = [(here, "gathered again")] if record.gemm.uses is not None else []
        return [(here, record.conversion), *again]
    if record.gemm.absorbed is not None:
        return [(here, record.gemm.absorbed.conversion)]
    if node.target is markers.cross_entropy and node.kwargs["vocab"]:
        # A cross-entropy over a split vocabulary reduces twice within one operator.
        sites = (f"{record.module or 'model'} {what} ({record.source})" for what in ("maximum", "sums"))
        return [(site, "vocab_parallel_cross_entropy") for site in sites]
    if node.target in markers.OVER_CLASSES.values():
        words = ("maximum", "sum", "position", "gradients")
        return [(f"{record.module or 'model'} {what} ({record.source})", op_name(node)) for what in words]
    return []


__all__ = ["Calls", "calls_of_nodes"]
