"""Find what only `autoptd.per_microbatch` reads: every microbatch computes it of its own rows, by itself.

In: a TRACED graph. Out: a note at these operators. A sum of theirs over the batch is that of a microbatch, no part of a larger
one; the mark makes it one, the mean over all microbatches.
"""

from __future__ import annotations

from torch.fx import Graph, Node

from autoptd.ir.notes import OF_MICROBATCH, note, op_name

MARK = "autoptd.per_microbatch"


def note_marked(graph: Graph) -> None:
    """Note the operators whose values are read by marks alone, directly or by way of others."""
    for node in reversed(graph.nodes):
        if node.op == "call_function" and node.users and all(map(_is_marked, node.users)):
            note(node).extra[OF_MICROBATCH] = True


def _is_marked(reader: Node) -> bool:
    return op_name(reader) == MARK or OF_MICROBATCH in note(reader).extra


__all__ = ["MARK", "note_marked"]
