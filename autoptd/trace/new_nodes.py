"""Make the operators that a trace is rewritten with, each with its value and the note of the node that it stands for.

In: that node. Out: operators in front of it, in the order in which they are asked for.

    make = Maker(node)
    put(node, make(aten.neg.default, make(aten.sum.default, x)))
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from autoptd.compat import FakeTensor
from autoptd.ir.notes import note, set_note, value

aten = torch.ops.aten


class Maker:
    """Makes operators that come from where `node` comes from, in front of it or of `before`, with notes that say `extra`."""

    def __init__(
        self, node: Node, before: Node | None = None, extra: Mapping[str, Any] | None = None
    ) -> None:
        self.node, self._before, self._extra = node, before or node, extra or {}

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        with self.node.graph.inserting_before(self._before):
            made = self.node.graph.call_function(target, args, kwargs)
        fakes, named = map_arg((args, kwargs), value)
        # Also what is made of numbers alone has no data.
        met = value(self.node)
        with torch.no_grad(), met.fake_mode if isinstance(met, FakeTensor) else nullcontext():
            made.meta["val"] = target(*fakes, **named)
        set_note(made, replace(note(self.node), extra=dict(self._extra)))
        return made

    def cast(self, x: Node, dtype: torch.dtype) -> Node:
        """Return `x` in a dtype: itself, where it has that."""
        return x if value(x).dtype == dtype else self(aten.to.dtype, x, dtype)


def put(node: Node, by: Any) -> None:
    """Let the readers of `node` read `by`, and erase it."""
    node.replace_all_uses_with(by)
    node.graph.erase_node(node)


__all__ = ["Maker", "put"]
