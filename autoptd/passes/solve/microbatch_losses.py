"""Find what only `autoptd.per_microbatch` reads: every microbatch computes it of its own rows, by itself.

In: a TRACED graph. Out: a note at these operators. A sum of theirs over the batch is that of a microbatch, no part of a larger
one; the mark makes it one, the mean over all microbatches.
"""

from __future__ import annotations

from dataclasses import replace

from torch.fx import Graph, Node

from autoptd.ir.notes import note, op_name

MARK = "autoptd.per_microbatch"


def note_marked(graph: Graph) -> None:
    """Note the operators whose values are read by marks alone, directly or by way of others."""
    for node in reversed(graph.nodes):
        if node.op == "call_function" and node.users and all(map(_is_marked, node.users)):
            note(node).rows = replace(note(node).rows, of_microbatch=True)


def _is_marked(reader: Node) -> bool:
    return op_name(reader) == MARK or note(reader).rows.of_microbatch


__all__ = ["MARK", "note_marked"]
