"""Mark which values of a graph depend on parameters, and which of them carry a gradient to one.

mark_dependence(graph, parameters)      # note(node).of_params, note(node).needs_grad
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.fx import Graph, Node

from autoptd.ir.notes import note, output
from autoptd.ir.operators.table import operator_of


def mark_dependence(graph: Graph, parameters: dict[str, nn.Parameter]) -> None:
    """Fill `of_params` and `needs_grad` of every node; remove detaches that have no effect."""
    _mark(graph, parameters)
    _drop_idle_detaches(graph)
    _forget_lost_gradients(graph)


def _drop_idle_detaches(graph: Graph) -> None:
    """Remove detaches of values without gradient (a table of sines under no_grad)."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.detach.default):
        source = node.args[0]
        if isinstance(source, Node) and not note(source).needs_grad:
            node.replace_all_uses_with(source)
            graph.erase_node(node)


def _forget_lost_gradients(graph: Graph) -> None:
    """Clear `needs_grad` of values that the loss reads only through detach or zeros_like.

    Their parameters are not trained.
    """
    # Walk backwards, like gradients: a value gets a gradient only from its readers.
    live = set(output(graph).all_input_nodes)
    for node in reversed(graph.nodes):
        if node not in live:
            # Includes the output node, which has no value.
            note(node).needs_grad = False
        elif note(node).needs_grad:
            live.update(node.all_input_nodes)


def _mark(graph: Graph, parameters: dict[str, nn.Parameter]) -> None:
    """Propagate parameters and gradients from operand to result."""
    for node in graph.nodes:
        record = note(node)
        if record.kind == "param":
            record.of_params, record.needs_grad = True, parameters[record.name].requires_grad
        elif node.op in ("call_function", "output"):
            operands = [note(arg) for arg in node.all_input_nodes]
            record.of_params = any(operand.of_params for operand in operands)
            result = node.meta.get("val")
            pieces = result if isinstance(result, (tuple, list)) else [result]
            needs_grad = any(operand.needs_grad for operand in operands)
            cuts = operator_of(node).cuts_gradient
            record.needs_grad = needs_grad and not cuts and any(map(_is_differentiable, pieces))


def _is_differentiable(piece: Any) -> bool:
    return isinstance(piece, torch.Tensor) and (piece.dtype.is_floating_point or piece.is_complex())


__all__ = ["mark_dependence"]
