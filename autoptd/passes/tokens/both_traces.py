"""Rewrite both traces of a TRACED graph alike: the one that is compiled, and the one with all samples.

The two are compared operator by operator later (`samples.py`), so a rewrite happens in both or in neither.

    whole = second_trace(graph, ctx)
    ...                                 # the same in both
    drop_unread(graph, whole)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from autoptd.ir.notes import Note, ops, set_note, value


def pairs(graph: Graph, whole: Graph) -> Iterator[tuple[Node, Node]]:
    """Return the pairs of operators of two traces, which may then be rewritten."""
    return zip(list(ops(graph)), list(ops(whole)), strict=False)


def drop_unread(*traces: Graph) -> None:
    """Remove the operators that are no longer read."""
    for trace in dict.fromkeys(traces):
        trace.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))


class Maker:
    """Make operators before a node, with the facts of `about`."""

    def __init__(self, graph: Graph, before: Node, about: Note) -> None:
        self.graph, self.before, self.about = graph, before, about

    def make(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        with self.graph.inserting_before(self.before):
            made = self.graph.call_function(target, args, kwargs)
        set_note(made, replace(self.about, kind="op", name=""))
        evaluate(made)
        return made


def evaluate(node: Node) -> None:
    """Compute the fake value of a node."""
    args, kwargs = map_arg((node.args, node.kwargs), value)
    with torch.no_grad():
        node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]
