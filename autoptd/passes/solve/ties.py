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

from autoptd.ir.layout import Layout
from autoptd.ir.notes import note, op_name, ops, output, tensor, value
from autoptd.ir.operators.table import linear_groups
from autoptd.ir.periods import find_periods
from autoptd.passes.solve.shard_pins import Pin
from autoptd.passes.solve.splits import Split

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
    splits: dict[Node, list[Split]],
    shards: Callable[[Node], list[Layout]],
    pins: Mapping[Node, Pin],
) -> Ties:
    """The ties of a graph; `splits` are the ways in which each operator may be split, `shards` are the types in which a
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
        [_signature(node, splits.get(node, []), facts) for node in body],
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
            if (
                operand.kind == "outer"
                and heads == {None}
                and all(note(one).kind == "param" for one in operand.nodes)
            ):
                same |= dict.fromkeys(operand.nodes, operand.nodes[0])
    return Ties(same, enters)


def _signature(node: Node, splits: list[Split], facts: dict[Node, str]) -> str:
    place = {arg: i for i, arg in enumerate(node.all_input_nodes)}
    literals = map_aggregate(
        (node.args, node.kwargs),
        lambda arg: (
            f"x{place[arg]}" if isinstance(arg, Node) else "#" if isinstance(arg, (int, float)) else arg
        ),
    )
    ways = []
    for split in splits:
        needs = sorted((place[arg], str(split.needs(arg))) for arg in split.carriers)
        ways.append((split.name, split.size, needs, str(split.gives), split.form))
    linear = [[place[arg] for arg in group] for group in linear_groups(node)]
    return repr(
        (op_name(node), str(literals), ways, linear, facts.get(node), [facts.get(arg) for arg in place])
    )


def _facts(node: Node, shards: Callable[[Node], list[Layout]]) -> str:
    record, made = note(node), value(node)
    sizes = [tuple(one.shape) for one in (made if isinstance(made, (tuple, list)) else [made])]
    kept = record.of_params, record.needs_grad, record.kind == "param"
    return repr((sizes, tensor(node).dtype, record.dims, list(map(str, shards(node))), kept))
