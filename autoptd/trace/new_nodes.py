"""Make the operators that a trace is rewritten with, each with its value and the note of the node that it stands for.

In: that node. Out: operators in front of it, in the order in which they are asked for.

    make = Maker(node)
    put(node, make(aten.neg.default, make(aten.sum.default, x)))
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from autoptd.compat import FakeTensor
from autoptd.ir.notes import Note, note, set_note, value

aten = torch.ops.aten


class Maker:
    """Makes operators that come from where `node` comes from, in front of it or of `before`, with the facts of `about`."""

    def __init__(self, node: Node, before: Node | None = None, about: Note | None = None) -> None:
        self.node, self._before, self._about = node, before or node, about

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        with self.node.graph.inserting_before(self._before):
            made = self.node.graph.call_function(target, args, kwargs)
        fakes, named = map_arg((args, kwargs), value)
        # Also what is made of numbers alone has no data.
        met = value(self.node)
        with torch.no_grad(), met.fake_mode if isinstance(met, FakeTensor) else nullcontext():
            made.meta["val"] = target(*fakes, **named)
        about = note(self.node) if self._about is None else self._about
        set_note(made, about.bare() if self._about is None else about.copy())
        return made

    def cast(self, x: Node, dtype: torch.dtype) -> Node:
        """Return `x` in a dtype: itself, where it has that."""
        return x if value(x).dtype == dtype else self(aten.to.dtype, x, dtype)


def put(node: Node, by: Any) -> None:
    """Let the readers of `node` read `by`, and erase it."""
    node.replace_all_uses_with(by)
    node.graph.erase_node(node)


__all__ = ["Maker", "put"]
