"""Strategies, and which nodes share one: those at the same place of repeated layers.

In: a graph, and what distinguishes its operators and values for the solver. Out: `Ties`, and the strategies of every node, made
once for all tied nodes. Two operators are tied if everything that the solver reads of them is equal: operator, shapes, axes,
the letters by which they may be split, and the operands that have these. The values that go from layer to layer are tied as
well, so that the first and the last layer are like all others; between the embedding and the first layer, or the last layer
and the head, a conversion takes up the difference.

    strategies = Strategies(make, find_ties(graph, ways, facts).same)
    strategies[node]            # all of them
    strategies.of(node, 2)      # one: of a tied node, the others are not made
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
from autoptd.ir.operators.record import operands
from autoptd.ir.periods import find_periods

WHOLE = "whole on every rank"
# A shorter repeat may be the queries, keys and values of one layer.
MIN_OPERATORS_OF_LAYER = 6


@dataclass(frozen=True)
class Strategy:
    """One way to run an operator, or to store a parameter, over a mesh axis.

    It has the types of each operand (I for values without parameters) and of the result, seconds, the reason, and the name of
    the operator's local form, if it has one.
    """

    needs: dict[Node, Layout]
    gives: Layout
    seconds: float
    why: str
    form: str = ""

    @property
    def is_split(self) -> bool:
        """Whether ranks compute, or store, different parts of something."""
        return any(types.shards for types in (self.gives, *self.needs.values()))

    @property
    def is_whole(self) -> bool:
        """Whether every rank computes, or stores, all of it."""
        return self.gives.is_whole and not self.is_split


class Strategies(dict[Node, list[Strategy]]):
    """The strategies of every node, made by `make` on first use; `same` maps tied nodes to the node they are tied to."""

    def __init__(self, make: Callable[[Node], list[Strategy]], same: dict[Node, Node]) -> None:
        super().__init__()
        self.make, self.same = make, same

    def __missing__(self, node: Node) -> list[Strategy]:
        head = self.same.get(node, node)
        if head is node:
            self[node] = self.make(node)
        else:
            counterpart = _counterparts(head, node)
            self[node] = [_moved(strategy, counterpart) for strategy in self[head]]
        return self[node]

    def of(self, node: Node, i: int) -> Strategy:
        """Return one strategy of a node."""
        head = self.same.get(node, node)
        if head is node or node in self:
            return self[node][i]
        return _moved(self[head][i], _counterparts(head, node))

    def alike(self, node: Node) -> list[Strategy]:
        """Return the strategies of the node that `node` is tied to, in terms of that node's operands."""
        return self[self.same.get(node, node)]


def _counterparts(head: Node, node: Node) -> dict[Node, Node]:
    """Return the operand of `node` for each operand of `head`, the node that it is tied to."""
    # Operands in order, each once: the k-th of layer 3 stands for the k-th of layer 0.
    return dict(zip(dict.fromkeys(operands(head)), dict.fromkeys(operands(node)), strict=True))


def _moved(strategy: Strategy, counterpart: dict[Node, Node]) -> Strategy:
    needs = {counterpart[operand]: types for operand, types in strategy.needs.items()}
    return Strategy(needs, strategy.gives, strategy.seconds, strategy.why, strategy.form)


@dataclass(frozen=True)
class Ties:
    """The nodes that share a decision.

    `same`: {node: the node of the first layer that is decided for it}. `enters`: {value that the first layer reads: the
    values of the first layer that the later ones read there, each from the layer before it}.
    """

    same: dict[Node, Node] = field(default_factory=dict)
    enters: dict[Node, list[Node]] = field(default_factory=dict)


def find_ties(graph: Graph, ways: Mapping[Node, Hashable], known: Callable[[Node], Hashable]) -> Ties:
    """Find the ties of a graph.

    `ways` are equal for operators that may be split alike; `known` returns what distinguishes a value from others of its
    shape: the types in which a parameter may be stored, and its pin.
    """
    body = list(ops(graph))
    # Equal facts have one number.
    numbers: dict[Hashable, int] = {}
    facts: dict[Node, int] = {}
    for node in graph.nodes:
        if node.op != "output" and value(node) is not None:
            facts[node] = numbers.setdefault(_facts(node, known), len(numbers))
    periods = find_periods(
        body,
        [_signature(node, ways.get(node), facts) for node in body],
        results={output(graph).args[0]},  # type: ignore[arg-type]
        rank=lambda period: () if period.length >= MIN_OPERATORS_OF_LAYER else None,
    )
    same: dict[Node, Node] = {}
    enters: dict[Node, list[Node]] = {}
    for period in periods:
        # Layer 0 reads `first` where layer k reads operator `index` of layer k - 1.
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


def _signature(node: Node, ways: Hashable, facts: dict[Node, int]) -> Hashable:
    """Return everything that the solver reads of an operator; operators with equal signatures are alike."""
    place = {arg: i for i, arg in enumerate(node.all_input_nodes)}

    def without_numbers(arg: Any) -> Any:
        if isinstance(arg, Node):
            return f"x{place[arg]}"
        # Numbers do not change what may be split: one layer may scale by another number than the next.
        return "#" if isinstance(arg, (int, float)) else arg

    literals = map_aggregate((node.args, node.kwargs), without_numbers)
    return node.target, str(literals), ways, facts.get(node), tuple(facts.get(arg) for arg in place)


def _facts(node: Node, known: Callable[[Node], Hashable]) -> Hashable:
    """Return everything that the solver reads of a value."""
    record, result = note(node), value(node)
    results = result if isinstance(result, (tuple, list)) else [result]
    sizes = tuple(tuple(part.shape) for part in results)
    # A value without gradient is read as I where others are read as R, and is not saved for backward.
    roles = record.of_params, record.needs_grad, record.kind == "param"
    return sizes, tensor(node).dtype, record.dims, known(node), roles
