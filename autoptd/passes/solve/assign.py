"""Assign the tensor axis: for every value a type over tp, for every operator the letter it is split by.

One variable per operator that depends on parameters (its strategies), one table per edge (the conversions it takes), one hub
per fan-out (a materialised type is paid for once, so q, k and v share a gather). Minimised exactly: see `eliminate.py`. Values
that depend on no parameter (ids, masks, tables of sines) are computed whole and sliced where an operator wants them split.
What the first layer reads is brought to one type in front of it (its *entry*): that which the other layers read, or a price
is paid, so that on near ties the first layer is like all others.
Ties: every list below has a fixed order, whole strategies first, and the lower index wins.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Hashable
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import numpy as np
from torch.fx import Graph, Node

from autoptd.ir.layout import Layout
from autoptd.ir.notes import note
from autoptd.ir.operators.record import operands
from autoptd.passes.ops.costs import conversion_seconds
from autoptd.passes.solve.edges import Hub, edge_factors, edge_price, entry_factors, price_table, wanted
from autoptd.passes.solve.eliminate import Factor, TableTooLarge, minimize, minimize_nearly
from autoptd.passes.solve.shard_pins import Pins, refuse_conflict
from autoptd.passes.solve.strategies import Splitter, Strategy, make_strategies
from autoptd.passes.solve.ties import Ties, find_ties


@dataclass(frozen=True)
class Problem:
    """What was minimised: `variable` of every node (tied nodes share one), its strategies, and the tables between variables."""

    variable: dict[Node, int]
    strategies: dict[Node, list[Strategy]]
    choices: list[int]
    factors: list[Factor]
    answer: list[int]
    searched: int = 0  # variables that a search decided: the price need not be the least

    def price(self, answer: list[int]) -> float:
        """Picoseconds of an answer, memory priced in."""
        return sum(float(table[tuple(answer[i] for i in names)]) for names, table in self.factors)

    @property
    def is_possible(self) -> bool:
        """Whether the answer is one that can be run."""
        return math.isfinite(self.price(self.answer))

    @property
    def impossible(self) -> set[Node]:
        """The nodes at the conversions of the answer that there are not."""
        tables = ((names, table[tuple(self.answer[i] for i in names)]) for names, table in self.factors)
        at = {i for names, seconds in tables if math.isinf(float(seconds)) for i in names}
        return {node for node, i in self.variable.items() if i in at}


@dataclass
class Assignment:
    """The solver's answer over one axis: a strategy per node, and per fan-out node the extra type that is materialised once.

    `entries` are the types in which repeated layers begin with a value that is made before them, `enters` what the second
    layer reads in the place of such a value. `cost` is a conversion's seconds, `price` what the solver paid for it; `problem`
    is what was minimised, with the `splitter` that said what may be split; `letters` are those that people know axes by
    (`symbols.py`).
    """

    axis: str
    strategies: dict[Node, Strategy]
    hubs: dict[Node, Layout]
    cost: Callable[[Node, Layout, Layout], float]
    price: Callable[[Node, Layout, Layout], float]
    problem: Problem | None = None
    splitter: Splitter | None = None
    letters: dict[int, str] = field(default_factory=dict)
    entries: dict[Node, Layout] = field(default_factory=dict)
    enters: dict[Node, Node] = field(default_factory=dict)

    def needs(self, reader: Node, operand: Node) -> Layout:
        """The types that `reader` wants `operand` in; values without parameters are I and stay so unless it says otherwise."""
        if reader.op == "output" or reader not in self.strategies:
            return Layout()
        return self.strategies[reader].needs[operand]

    def route(self, operand: Node, target: Layout) -> list[Layout]:
        """The types to convert `operand` to, one after the other, to reach `target`: from its entry, directly or through its
        hub.
        """
        made, hub = note(operand).layout.over(self.axis), self.hubs.get(operand)
        source = self.entries.get(operand, made)
        path = [source] if source != made else []
        if hub in (None, source, target) or self.price(operand, source, target) <= self.price(
            operand, hub, target
        ):
            return [*path, target] if target != source else path
        assert hub is not None
        return [*path, hub, target]


def assign_tensor(graph: Graph, splitter: Splitter) -> Assignment:
    """Solve the assignment over an axis and fill `layout`, `forms` and `why` of every node that depends on parameters.

    Layers that repeat get one answer (`ties.py`): it is found once, and the emitted program can say it once.
    """
    problem, hubs, entries, enters = _solve_graph(graph, splitter)
    chosen = _chosen(problem)
    for node, strategy in chosen.items():
        record = note(node)
        record.layout, record.why = record.layout.replacing(splitter.axis, strategy.gives), strategy.why
        if strategy.form:
            record.forms = {**record.forms, splitter.axis: strategy.form}
    price = partial(edge_price, splitter)
    return Assignment(
        splitter.axis,
        chosen,
        hubs,
        partial(price, count=conversion_seconds),
        price,
        problem,
        splitter,
        {},
        entries,
        enters,
    )


def find_plan(graph: Graph, splitter: Splitter) -> dict[Node, Strategy]:
    """The strategies of the cheapest plan; the graph is left as it is."""
    return _chosen(_solve_graph(graph, splitter).problem)


def _chosen(problem: Problem) -> dict[Node, Strategy]:
    return {node: problem.strategies[node][problem.answer[i]] for node, i in problem.variable.items()}


class Solved(NamedTuple):
    """A problem with its answer, the types of hubs and entries, and what stands for these between layers."""

    problem: Problem
    hubs: dict[Node, Layout]
    entries: dict[Node, Layout]
    enters: dict[Node, Node]


def _solve_graph(graph: Graph, splitter: Splitter) -> Solved:
    """Solve; PlanError where no plan keeps all pins."""
    found = _try_graph(graph, splitter)
    if found.problem.is_possible:
        return found
    if not splitter.pins:
        raise TableTooLarge.of_solver()

    def is_possible(pins: Pins) -> bool:
        trial = copy(splitter)
        trial.pins = pins
        return _try_graph(graph, trial).problem.is_possible

    raise refuse_conflict(splitter.pins, is_possible)


def _try_graph(graph: Graph, splitter: Splitter) -> Solved:
    """Solve; the price of the answer is infinite where there is none."""
    solved = [node for node in graph.nodes if note(node).of_params and node.op != "output"]
    splits = {node: splitter.splits(node) for node in solved if node.op == "call_function"}
    ties = find_ties(graph, splits, splitter.shards, splitter.pins)
    try:
        found = _solve(solved, _Strategies(splitter, ties.same), splitter, ties)
        if (
            splitter.pins and not found.problem.is_possible
        ):  # what is pinned may come from a vote, which ties no layers
            found = _solve(solved, _Strategies(splitter, {}), splitter, Ties())
        return found
    except TableTooLarge:
        return _solve_by_votes(solved, splitter)


def _solve_by_votes(solved: list[Node], splitter: Splitter) -> Solved:
    """Solve where parameters that many layers share tie these all to each other.

    Their types are voted on by their readers, then fixed. One that a reader cannot read so is whole instead.
    """
    strategies = _Strategies(splitter, {})
    shared = {node for node in solved if note(node).kind == "param" and len(node.users) > 1}
    votes = {node: Counter[int]() for node in shared}
    _solve(solved, strategies, splitter, Ties(), apart=shared, votes=votes, exact=False)
    whole = {node: strategies[node][:1] for node in shared}
    for node in shared:
        winner = max(votes[node], key=lambda i: (votes[node][i], -i))
        strategies[node] = [strategies[node][winner]]
    while True:
        left = [node for node in solved if node in shared and strategies[node] != whole[node]]
        try:
            found = _solve(solved, strategies, splitter, Ties(), without_hub=shared, exact=False)
        except TableTooLarge:
            if not left:
                raise
        else:
            impossible = found.problem.impossible
            left = [node for node in left if node in impossible]
            if not left:
                return found
        strategies |= {node: whole[node] for node in left}


class _Strategies(dict[Node, list[Strategy]]):
    """The strategies of every node, made when they are asked for; tied nodes have those of the one they are tied to."""

    def __init__(self, splitter: Splitter, same: dict[Node, Node]) -> None:
        super().__init__()
        self.splitter, self.same = splitter, same

    def __missing__(self, node: Node) -> list[Strategy]:
        head = self.same.get(node, node)
        if head is node:
            self[node] = make_strategies(node, self.splitter)
        else:
            there, here = (list(dict.fromkeys(operands(one))) for one in (head, node))
            own = dict(zip(there, here, strict=True))
            self[node] = [
                replace(one, needs={own[arg]: kind for arg, kind in one.needs.items()}) for one in self[head]
            ]
        return self[node]


def _solve(
    solved: list[Node],
    strategies: dict[Node, list[Strategy]],
    splitter: Splitter,
    ties: Ties,
    *,
    apart: Collection[Node] = (),
    votes: dict[Node, Counter[int]] | None = None,
    without_hub: Collection[Node] = (),
    exact: bool = True,
) -> Solved:
    """Return the problem with its answer of least cost, and the types of hubs and entries.

    Tied nodes share a variable, and equal tables between the same variables are one table, times their number. A parameter in
    `apart` is chosen for every reader by itself; how often each of its strategies was is added to `votes`.
    """
    same = ties.same
    heads = [node for node in solved if same.get(node, node) is node]
    variable = {node: i for i, node in enumerate(heads)}
    variable |= {node: variable[same[node]] for node in solved if node not in variable}
    choices = [len(strategies[node]) for node in heads]
    factors: list[Factor] = []
    tables: dict[Hashable, tuple[list[Factor], Hub | None]] = {}
    times: Counter[Hashable] = Counter()
    hubs: dict[Node, Hub] = {}
    entries: dict[Node, Hub] = {}
    copies: list[tuple[Node, int]] = []
    for node in solved:
        readers = [user for user in node.users if user in variable or user.op == "output"]
        if node in apart:
            for reader in readers:
                copies.append((node, len(choices)))
                own = variable | {node: len(choices)}
                seconds = [one.seconds / len(readers) for one in strategies[node]]
                factors.append(((len(choices),), price_table(seconds)))
                choices.append(len(seconds))
                made = own[node], [one.gives for one in strategies[node]]
                factors += edge_factors(node, [reader], strategies, own, made, None, splitter)
            continue
        others = [other for other in ties.enters.get(node, ()) if other in variable]
        key = (variable[node], tuple(sorted(variable.get(reader, -1) for reader in readers)), bool(others))
        if key not in tables:
            found: list[Factor] = [
                ((variable[node],), price_table([one.seconds for one in strategies[node]]))
            ]
            source: Hub = variable[node], [one.gives for one in strategies[node]]
            if others:
                kinds = [*source[1], *(one.gives for other in others for one in strategies[other])]
                entries[node] = len(choices), list(dict.fromkeys(kinds))
                choices.append(len(entries[node][1]))
                found += entry_factors(node, others, strategies, variable, entries[node], splitter)
                source = entries[node]
            hub: Hub | None = None
            if len(readers) > 1 and node not in without_hub:
                kinds = source[1] + wanted(node, readers, strategies)
                hub = len(choices), list(dict.fromkeys(kinds))
                choices.append(len(hub[1]))
            tables[key] = (
                found + edge_factors(node, readers, strategies, variable, source, hub, splitter),
                hub,
            )
        times[key] += 1
        if (of_node := tables[key][1]) is not None:
            hubs[node] = of_node
    factors += [(names, table * times[key]) for key, (made, _) in tables.items() for names, table in made]
    factors = [_without_repeats(one) for one in factors]
    answer, searched = (minimize(choices, factors), 0) if exact else minimize_nearly(choices, factors)
    for node, i in copies:
        assert votes is not None
        votes[node][answer[i]] += 1

    def types(found: dict[Node, Hub]) -> dict[Node, Layout]:
        return {node: kinds[answer[i]] for node, (i, kinds) in found.items()}

    enters = {node: ties.enters[node][0] for node in entries}
    return Solved(
        Problem(variable, strategies, choices, factors, answer, searched), types(hubs), types(entries), enters
    )


def _without_repeats(factor: Factor) -> Factor:
    """A table between a value and what is read of it in the next layer names their common variable twice: the diagonal."""
    names, table = factor
    kept = tuple(dict.fromkeys(names))
    if len(kept) == len(names):
        return factor
    return kept, np.einsum(table, [kept.index(name) for name in names], list(range(len(kept))))
