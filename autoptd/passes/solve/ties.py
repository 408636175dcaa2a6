"""Which operators and parameters get one answer from the solver: those that stand at the same place of repeated layers.

In: a graph with its axes. Out: `Ties`. Two operators are alike when everything that the solver looks at is: operator, shapes,
axes, the letters by which they may be split, and how their operands lie. The values that go from layer to layer are tied as
well, so that the first and the last layer are like all others; what it takes to bring the embedding to the first layer, or the
last layer's result to the head, are conversions between them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch.fx import Graph, Node
from torch.fx.node import map_aggregate

from autoptd.ir.notes import note, op_name, ops, output, tensor, value
from autoptd.ir.operators.table import linear_groups
from autoptd.ir.periods import find_periods
from autoptd.ir.types import ValueType
from autoptd.passes.axes.axes import Letter
from autoptd.passes.solve.shard_pins import Pin

SHORTEST = 6  # operators of a layer: a shorter repeat may be the queries, keys and values of one layer


@dataclass(frozen=True)
class Ties:
    """`same`: {node: the node that is decided for it}. `enters`: {value that the first layer reads: those that the others read
    in its place}, the latter by the nodes that are decided.
    """

    same: dict[Node, Node] = field(default_factory=dict)
    enters: dict[Node, list[Node]] = field(default_factory=dict)


def find_ties(
    graph: Graph,
    letters: dict[Node, list[Letter]],
    shards: Callable[[Node], list[ValueType]],
    pins: Mapping[Node, Pin],
) -> Ties:
    """The ties of a graph; `letters` are those by which each operator may be split, `shards` are the types in which a
    value may be stored in shards, `pins` what is decided already.
    """
    body = list(ops(graph))
    facts = {
        node: _facts(node, shards) + (pins[node].where if node in pins else "")
        for node in graph.nodes
        if node.op != "output" and value(node) is not None
    }
    periods = find_periods(
        body,
        [_signature(node, letters.get(node, []), facts) for node in body],
        results={output(graph).args[0]},  # type: ignore[arg-type]
        rank=lambda period: () if period.length >= SHORTEST else None,
    )
    same: dict[Node, Node] = {}
    enters: dict[Node, list[Node]] = {}
    for period in periods:
        for index, first in period.carried.items():
            enters.setdefault(first, []).append(body[period.start + index])
        for i in range(period.start, period.stop):
            same[body[i]] = body[period.start + (i - period.start) % period.length]
        for operand in (one for slots in period.operands for one in slots):
            heads = {same.get(node) for node in operand.nodes}
            if operand.kind == "outer" and heads == {None} and all(note(one).kind == "param" for one in operand.nodes):
                same |= dict.fromkeys(operand.nodes, operand.nodes[0])
    return Ties(same, enters)


def _signature(node: Node, letters: list[Letter], facts: dict[Node, str]) -> str:
    place = {arg: i for i, arg in enumerate(node.all_input_nodes)}
    literals = map_aggregate(
        (node.args, node.kwargs),
        lambda arg: f"x{place[arg]}" if isinstance(arg, Node) else "#" if isinstance(arg, (int, float)) else arg,
    )
    split = [
        (one.name, one.size, sorted((place[arg], str(one.needs(arg))) for arg in one.places), str(one.gives), one.form)
        for one in letters
    ]
    linear = [[place[arg] for arg in group] for group in linear_groups(node)]
    return repr((op_name(node), str(literals), split, linear, facts.get(node), [facts.get(arg) for arg in place]))


def _facts(node: Node, shards: Callable[[Node], list[ValueType]]) -> str:
    record, made = note(node), value(node)
    sizes = [tuple(one.shape) for one in (made if isinstance(made, (tuple, list)) else [made])]
    kept = record.of_params, record.needs_grad, record.kind == "param"
    return repr((sizes, tensor(node).dtype, record.dims, list(map(str, shards(node))), kept))
