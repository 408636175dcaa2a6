"""Find the parameters that emitted code reads within one layer only, so that they can be gathered and freed with it.

In: a LOCAL graph, and the crossings of its stages. Out: {"h.3.mlp.c_fc.weight": "h.3"}, for ZeRO's stage 3.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import Graph, Node

from autoptd.codegen.methods import outer_operands
from autoptd.codegen.parts import Crossing, divide
from autoptd.codegen.repeats import Run
from autoptd.ir.names import layer_of
from autoptd.ir.notes import note, ops, placeholders


def own_layers(graph: Graph, crossing: Sequence[Crossing], stages: int) -> dict[str, str]:
    """Return the layers of parameters, by the first number in their names."""
    params = list(placeholders(graph, "param"))
    elsewhere = _read_together(graph, set(params)) | _passed(graph, crossing, stages)
    names = [note(node).name for node in params if node not in elsewhere]
    return {name: layer for name in names if (layer := _layer(name))}


def _layer(name: str) -> str:
    layer = layer_of(name)
    return layer if layer.rpartition(".")[2].isdigit() else ""


def _read_together(graph: Graph, params: set[Node]) -> set[Node]:
    """Return the parameters of different layers that one operator reads: they must be there together."""
    found: set[Node] = set()
    for node in ops(graph):
        read = params.intersection(node.all_input_nodes)
        if len({_layer(note(param).name) for param in read}) > 1:
            found |= read
    return found


def _passed(graph: Graph, crossing: Sequence[Crossing], stages: int) -> set[Node]:
    """Return the parameters that calls of methods are given, which are used after others have been read."""
    found: set[Node] = set()
    for part in divide(graph, crossing, stages):
        for call in part.calls:
            if isinstance(call, Run):
                operands = [node for nodes in outer_operands(call.repeat) for node in nodes]
            else:
                operands = [operand for node in call.nodes for operand in node.all_input_nodes]
            found.update(node for node in operands if note(node).kind == "param")
    return found
