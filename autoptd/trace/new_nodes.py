"""Insert operators into a trace, each with its value and the note of the node that it replaces.

In: that node. Out: operators before it, in the order in which they are made.

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
    """Make operators with the origin of `node` and the facts of `about`, before `node` or `before`."""

    def __init__(self, node: Node, before: Node | None = None, about: Note | None = None) -> None:
        self.node, self._before, self._about = node, before or node, about

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        with self.node.graph.inserting_before(self._before):
            made = self.node.graph.call_function(target, args, kwargs)
        fakes, named = map_arg((args, kwargs), value)
        # Values made from numbers alone must not have data either.
        met = value(self.node)
        with torch.no_grad(), met.fake_mode if isinstance(met, FakeTensor) else nullcontext():
            made.meta["val"] = target(*fakes, **named)
        about = note(self.node) if self._about is None else self._about
        set_note(made, about.bare() if self._about is None else about.copy())
        return made

    def cast(self, x: Node, dtype: torch.dtype) -> Node:
        """Return `x` cast to a dtype, or `x` itself if it has that dtype."""
        return x if value(x).dtype == dtype else self(aten.to.dtype, x, dtype)


def put(node: Node, by: Any) -> None:
    """Replace all uses of `node` with `by`, and erase it."""
    node.replace_all_uses_with(by)
    node.graph.erase_node(node)
