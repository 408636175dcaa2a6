"""Constants of a traced graph: values that depend on neither inputs nor parameters (position ids, causal masks).

They can be computed while compiling, and so be asked what they are: whether all their rows along the batch are equal, and
whether they change with the number of rows of the trace.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from autoptd.ir.buffers import Buffers
from autoptd.ir.notes import note, op_name, shape, value

LARGEST = 1 << 28  # entries; a larger constant is not evaluated


class Constants:
    """Evaluates constants of the graphs of one model; `buffers` are the model's values by name."""

    def __init__(self, buffers: Mapping[str, torch.Tensor]) -> None:
        self._buffers = buffers if isinstance(buffers, Buffers) else Buffers(buffers)
        self._device = self._buffers.device
        self._constant: dict[Node, bool] = {}
        self._values: dict[Node, torch.Tensor] = {}
        self._equal: dict[tuple[Node, int], bool] = {}  # every layer asks for the mask again

    def is_constant(self, node: Node) -> bool:
        """True for buffers and for operators that read nothing but constants."""
        if node not in self._constant:
            is_op = node.op == "call_function" and op_name(node) != "aten.dropout"  # which differs from step to step
            reads = is_op and all(self.is_constant(arg) for arg in node.all_input_nodes)
            self._constant[node] = reads or note(node).kind == "buffer"
        return self._constant[node]

    def has_equal_rows(self, node: Node, dim: int) -> bool:
        """True when `node` is a constant operator whose entries along `dim` are all the same."""
        if node.op != "call_function" or not self.can_evaluate(node):
            return False
        if (node, dim) not in self._equal:
            found = self.evaluate(node)
            is_repeated = found.stride(dim) == 0  # an expand: nothing to compare
            self._equal[node, dim] = is_repeated or torch.equal(found, found.narrow(dim, 0, 1).expand_as(found))
        return self._equal[node, dim]

    def follows_rows(self, node: Node, other: Node) -> bool:
        """True when anything that `node` is computed from differs in size or number from the other trace."""
        pairs, seen = [(node, other)], set()
        while pairs:
            ours, theirs = pairs.pop()
            if ours in seen:
                continue
            seen.add(ours)
            if value(ours) is not None and shape(ours) != shape(theirs):
                return True
            if _literals(ours) != _literals(theirs):
                return True
            pairs += list(zip(ours.all_input_nodes, theirs.all_input_nodes, strict=True))
        return False

    def evaluate(self, node: Node) -> torch.Tensor:
        """The value of a constant, computed once."""
        if node not in self._values:
            if node.op == "placeholder":
                self._values[node] = self._buffers[note(node).name]
            else:
                args, kwargs = map_arg((node.args, node.kwargs), self.evaluate)
                with torch.device(self._device):
                    self._values[node] = node.target(*args, **kwargs)
        return self._values[node]

    def is_small(self, node: Node) -> bool:
        """Whether it may be computed here: an expand is a view, and takes no memory of its own."""
        made = node.all_input_nodes[0] if op_name(node) == "aten.expand" else node
        return value(made) is None or math.prod(shape(made)) <= LARGEST

    def can_evaluate(self, node: Node) -> bool:
        """Whether `node` is a constant whose value can be had while compiling."""
        return self.is_constant(node) and self._can_evaluate(node)

    def _can_evaluate(self, node: Node) -> bool:
        """False where a buffer has no value (meta) or a table is too large to make just to look at it."""
        if node.op == "placeholder":
            return self._buffers.has_value(note(node).name)
        return self.is_small(node) and all(self._can_evaluate(arg) for arg in node.all_input_nodes)


def _literals(node: Node) -> str:
    return str(map_arg((node.args, node.kwargs), lambda arg: None))
