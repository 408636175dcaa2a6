"""Which operators and parameters get one answer from the solver: those at the same place of repeated layers.

In: a graph with its axes. Out: `Ties`. Two operators are alike if everything that the solver looks at is the same: operator,
shapes, axes, the letters by which they may be split, and which of their operands have these. The values that go from layer to
layer are tied as well, so that the first and the last layer are like all others; bringing the embedding to the first layer, or
the last layer's result to the head, is a conversion between them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Graph, Node
from torch.fx.node import map_aggregate

from autoptd.ir.layout import Layout
from autoptd.ir.notes import note, ops, output, tensor, value
from autoptd.ir.periods import find_periods
from autoptd.passes.solve.shard_pins import Pin
from autoptd.passes.solve.splits import Split

# A shorter repeat may be the queries, keys and values of one layer.
MIN_OPERATORS_OF_LAYER = 6


@dataclass(frozen=True)
class Ties:
    """The nodes that share a decision.

    `same`: {node: the node of the first layer that is decided for it}. `enters`: {value that the first layer reads: the
    values of the first layer that the later ones read there, each from the layer before it}.
    """

    same: dict[Node, Node] = field(default_factory=dict)
    enters: dict[Node, list[Node]] = field(default_factory=dict)


def find_ties(
    graph: Graph,
    splits: dict[Node, list[Split]],
    known: Callable[[Node], list[Layout]],
    pins: Mapping[Node, Pin],
) -> Ties:
    """Find the ties of a graph.

    `splits` are the ways in which each operator may be split, `known` gives the types that tell a value from others of its
    shape (those in which it may be stored in shards), and `pins` is what the user decided: a pinned parameter is not like one
    that is not.
    """
    body = list(ops(graph))
    # Equal facts have one number.
    numbers: dict[Hashable, int] = {}
    facts: dict[Node, int] = {}
    for node in graph.nodes:
        if node.op != "output" and value(node) is not None:
            found = _facts(node, known), pins[node].where if node in pins else ""
            facts[node] = numbers.setdefault(found, len(numbers))
    periods = find_periods(
        body,
        [_signature(node, splits.get(node, []), facts) for node in body],
        results={output(graph).args[0]},  # type: ignore[arg-type]
        rank=lambda period: () if period.length >= MIN_OPERATORS_OF_LAYER else None,
    )
    same: dict[Node, Node] = {}
    enters: dict[Node, list[Node]] = {}
    for period in periods:
        # `first` is read by layer 0 in the place where layer k reads operator `index` of layer k - 1.
        for index, first in period.carried.items():
            enters.setdefault(first, []).append(body[period.start + index])
        # Operator j of every layer is decided with operator j of the first.
        for i in range(period.start, period.stop):
            same[body[i]] = body[period.start + (i - period.start) % period.length]
        for operand in itertools.chain.from_iterable(period.operands):
            is_untied = all(same.get(node) is None for node in operand.nodes)
            is_param = all(note(node).kind == "param" for node in operand.nodes)
            # One parameter per layer: tie them to that of the first.
            if operand.kind == "outer" and is_untied and is_param and operand.nodes:
                same |= dict.fromkeys(operand.nodes, operand.nodes[0])
    return Ties(same, enters)


def _signature(node: Node, splits: list[Split], facts: dict[Node, int]) -> Hashable:
    """Return everything that the solver looks at in an operator; operators of which it is equal are alike."""
    place = {arg: i for i, arg in enumerate(node.all_input_nodes)}

    def without_numbers(arg: Any) -> Any:
        if isinstance(arg, Node):
            return f"x{place[arg]}"
        # Numbers do not change what may be split: one layer may scale by another number than the next.
        return "#" if isinstance(arg, (int, float)) else arg

    literals = map_aggregate((node.args, node.kwargs), without_numbers)
    ways = []
    for split in splits:
        for axis, letter in split.letters:
            cut = tuple((place[arg], at) for arg, at in letter.places.items())
            ways.append(
                (axis, split.whole, split.order, letter.name, letter.size, cut, letter.out, letter.form)
            )
    return node.target, str(literals), tuple(ways), facts.get(node), tuple(facts.get(arg) for arg in place)


def _facts(node: Node, known: Callable[[Node], list[Layout]]) -> Hashable:
    """Return what the solver looks at in a value."""
    record, result = note(node), value(node)
    results = result if isinstance(result, (tuple, list)) else [result]
    sizes = tuple(tuple(part.shape) for part in results)
    # What has no gradient is wanted as I where other values are wanted as R, and nobody saves it.
    roles = record.of_params, record.needs_grad, record.kind == "param"
    return sizes, tensor(node).dtype, record.dims, tuple(known(node)), roles
