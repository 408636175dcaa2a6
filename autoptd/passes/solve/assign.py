"""Assign the tensor axis: for every value a type over tp, for every operator the letter it is split by.

In: a graph with named axes, and the `Splitter` that says what may be split. Out: `Assignment`, and the notes filled.

- One variable per operator that depends on parameters (its strategies), one table per edge (the conversions it takes).
- One *shared conversion* per fan-out: a type that is materialised once for several readers is paid for once, so q, k and
  v share a gather.
- Values that depend on no parameter (ids, masks, tables of sines) are computed whole and sliced where an operator wants
  them split.
- What the first layer reads is brought to one type in front of it (its *entry*). Unless that is the type which the other
  layers read, a price is paid: on near ties the first layer is like all others.

The sum of the tables is minimised exactly: see `eliminate.py`. Ties are broken by order: every list below has a fixed one,
whole strategies first, and the lower index wins.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import numpy as np
from torch.fx import Graph, Node

from autoptd.ir import markers
from autoptd.ir.layout import Layout, loss_over
from autoptd.ir.notes import note
from autoptd.passes.ops.costs import conversion_seconds
from autoptd.passes.solve.edges import TypeVariable
from autoptd.passes.solve.eliminate import Factor, TableTooLarge, minimize, minimize_nearly
from autoptd.passes.solve.prices import AxisPrices, edge_price
from autoptd.passes.solve.problem import Problem, Variables
from autoptd.passes.solve.shard_pins import Pins, refuse_conflict
from autoptd.passes.solve.strategies import Splitter
from autoptd.passes.solve.strategy import Strategy
from autoptd.passes.solve.tied import Strategies
from autoptd.passes.solve.ties import Ties, find_ties

# Strategies that are given for some operators.
Asked = Mapping[Node, Strategy] | None


@dataclass
class Assignment:
    """The solver's answer over one axis: a strategy per node, and what is needed to follow and to explain it.

    - `shared_conversions`: the type that a value with several readers is converted to once.
    - `entries`: the types in which repeated layers begin with a value that is made before them; `enters`: what the second
      layer reads instead of such a value.
    - `cost`: a conversion's seconds; `price`: what the solver paid for it.
    - `problem`: what was minimised, with the `splitter` that said what may be split.
    - `letters`: the letters of the axes in formulas (`symbols.py`).
    """

    axis: str
    strategies: dict[Node, Strategy]
    shared_conversions: dict[Node, Layout]
    cost: Callable[[Node, Layout, Layout], float]
    price: Callable[[Node, Layout, Layout], float]
    problem: Problem | None = None
    splitter: Splitter | None = None
    letters: dict[int, str] = field(default_factory=dict)
    entries: dict[Node, Layout] = field(default_factory=dict)
    enters: dict[Node, Node] = field(default_factory=dict)

    def needs(self, reader: Node, operand: Node) -> Layout:
        """Return the types in which `reader` wants `operand`: I where its strategy says nothing of it."""
        if reader.op == "output":
            return loss_over(self.axis)
        if reader not in self.strategies:
            return Layout()
        return self.strategies[reader].needs[operand]

    def route(self, operand: Node, target: Layout) -> list[Layout]:
        """Return the types to convert `operand` to, one after the other, to reach `target`.

        The way begins at its entry, where it has one, and goes through its shared conversion where that is cheaper.
        """
        own = note(operand).layout.over(self.axis)
        source = self.entries.get(operand, own)
        # At most own type -> entry -> shared conversion -> the reader's type, less steps that change nothing.
        path = [source] if source != own else []
        shared = self.shared_conversions.get(operand)
        if shared is not None and shared not in (source, target):
            # The same comparison as in the solver's table, `_shared_table`: both must take the same way.
            direct, onward = self.price(operand, source, target), self.price(operand, shared, target)
            if onward < direct:
                return [*path, shared, target]
        return [*path, target] if target != source else path


def assign_tensor(graph: Graph, splitter: Splitter, asked: Asked = None) -> Assignment:
    """Solve the assignment over an axis and fill `layout`, `forms` and `why` of every node that depends on parameters.

    Layers that repeat get one answer (`ties.py`): it is found once, and the emitted program has them once. `asked` are
    strategies that were found over several axes together: the rest is solved around them. Raises PlanError where no plan keeps
    all pins, or none was found.
    """
    if asked:
        solution = _try_graph(graph, splitter, asked)
        if solution.problem.is_possible and follows(_chosen(solution.problem), asked):
            return write_solved(solution, splitter)
    return write_solved(_solve_graph(graph, splitter), splitter)


def write_solved(solved: Solved, splitter: Splitter) -> Assignment:
    """Fill `layout`, `forms` and `why` of every node that was solved."""
    problem, shared_conversions, entries, enters = solved
    chosen = _chosen(problem)
    # Only now, so that a search among plans (votes, pins) leaves no trace in the notes.
    for node, strategy in chosen.items():
        record = note(node)
        record.layout = record.layout.replacing(splitter.axis, strategy.gives)
        # A conversion over another axis is there for a reason of its own.
        if node.target not in markers.PLACED:
            record.why = _joined(record.why, strategy.why, splitter.axis)
        if strategy.form:
            record.forms = {**record.forms, splitter.axis: strategy.form}
    price = partial(edge_price, splitter)
    return Assignment(
        splitter.axis,
        chosen,
        shared_conversions,
        cost=partial(price, count=conversion_seconds),
        price=price,
        problem=problem,
        splitter=splitter,
        entries=entries,
        enters=enters,
    )


def _joined(before: str, why: str, axis: str) -> str:
    """Return the reason of a split, behind that of another axis where there is one."""
    return f"{before}; over {axis} {why}" if before and why != before else why


def find_plan(graph: Graph, splitter: Splitter) -> dict[Node, Strategy]:
    """Return the strategies of the cheapest plan, without writing them into the graph."""
    return _chosen(_solve_graph(graph, splitter).problem)


def _chosen(problem: Problem) -> dict[Node, Strategy]:
    return {node: problem.strategies.of(node, problem.answer[i]) for node, i in problem.variable.items()}


class Solved(NamedTuple):
    """A problem with its answer, the types of shared conversions and entries, and what the second layer reads there."""

    problem: Problem
    shared_conversions: dict[Node, Layout]
    entries: dict[Node, Layout]
    enters: dict[Node, Node]


def _solve_graph(graph: Graph, splitter: Splitter) -> Solved:
    """Solve; PlanError where no plan keeps all pins."""
    solution = _try_graph(graph, splitter)
    if solution.problem.is_possible:
        return solution
    if not splitter.pins:
        raise TableTooLarge.of_solver()

    def is_possible(pins: Pins) -> bool:
        # A shallow copy: axes and factors, which take long to find, do not depend on pins.
        trial = copy(splitter)
        trial.pins = pins
        return _try_graph(graph, trial).problem.is_possible

    raise refuse_conflict(splitter.pins, is_possible)


def _try_graph(graph: Graph, splitter: Splitter, asked: Asked = None) -> Solved:
    """Solve; the price of the answer is infinite where there is none."""
    # What depends on no parameter (masks, positions) is computed whole on every rank, and has no variable.
    solved = [node for node in graph.nodes if splitter.decides(node) and node.op != "output"]
    splits = {node: splitter.splits(node) for node in solved if node.op == "call_function"}
    ties, prices = find_ties(graph, splits, splitter.facts, splitter.pins), AxisPrices(splitter)
    try:
        solution = solve_tied(solved, Strategies(splitter, ties.same), prices, ties, asked=asked)
        # Pins may keep the outcome of a vote, which ties no layers: try without ties.
        if splitter.pins and not solution.problem.is_possible:
            solution = solve_tied(solved, Strategies(splitter, {}), prices, Ties())
        return solution
    except TableTooLarge:
        return _solve_by_votes(solved, prices)


def _solve_by_votes(solved: list[Node], prices: AxisPrices) -> Solved:
    """Solve where the tables become too large because many layers read the same parameters.

    The readers of such a parameter vote on its type, which is then fixed. Where a reader cannot use it, it is whole instead.
    """
    strategies = Strategies(prices.splitter, {})
    shared = {node for node in solved if note(node).kind == "param" and len(node.users) > 1}
    votes = {node: Counter[int]() for node in shared}
    solve_tied(solved, strategies, prices, Ties(), apart=shared, votes=votes, exact=False)
    # The first strategy of a parameter is "replicated", which every reader can use.
    whole = {node: strategies[node][:1] for node in shared}
    for node in shared:
        winner = max(votes[node], key=lambda i: (votes[node][i], -i))
        strategies[node] = [strategies[node][winner]]
    while True:
        left = [node for node in solved if node in shared and strategies[node] != whole[node]]
        try:
            solution = solve_tied(solved, strategies, prices, Ties(), without_sharing=shared, exact=False)
        except TableTooLarge:
            if not left:
                raise
        else:
            impossible = solution.problem.impossible
            left = [node for node in left if node in impossible]
            if not left:
                return solution
        # Every round makes at least one more parameter whole, so this ends.
        strategies |= {node: whole[node] for node in left}


def solve_tied(
    solved: list[Node],
    strategies: Strategies,
    prices: AxisPrices,
    ties: Ties,
    *,
    apart: Collection[Node] = (),
    votes: dict[Node, Counter[int]] | None = None,
    without_sharing: Collection[Node] = (),
    exact: bool = True,
    asked: Asked = None,
) -> Solved:
    """Return the problem with its answer of least cost, and the types of shared conversions and entries.

    Tied nodes share a variable. A parameter in `apart` is chosen for every reader by itself; how often each of its
    strategies was chosen is added to `votes`.
    """
    variables = Variables(solved, strategies, prices, ties)
    copies: list[tuple[Node, int]] = []
    for node in solved:
        if node in apart:
            copies += [(node, i) for i in variables.add_apart(node)]
        else:
            variables.add(node, may_share=node not in without_sharing)
    choices, factors = variables.choices, variables.all_factors()
    known = [*factors, *_only(variables, asked or {})]
    answer, searched = (minimize(choices, known), 0) if exact else minimize_nearly(choices, known)
    for node, i in copies:
        assert votes is not None
        votes[node][answer[i]] += 1

    def types(chosen: dict[Node, TypeVariable]) -> dict[Node, Layout]:
        return {node: kinds[answer[i]] for node, (i, kinds) in chosen.items()}

    problem = Problem(variables.variable, strategies, choices, factors, answer, searched)
    enters = {node: ties.enters[node][0] for node in variables.entries}
    return Solved(problem, types(variables.shared), types(variables.entries), enters)


def _only(variables: Variables, asked: Mapping[Node, Strategy]) -> Iterator[Factor]:
    """Yield tables that forbid all but the strategies that are asked for, where a node has them."""
    taken: set[int] = set()
    for node, strategy in asked.items():
        variable = variables.variable.get(node)
        if variable is None or variable in taken:
            continue
        taken.add(variable)
        other = [not _is_like(each, strategy) for each in variables.strategies[node]]
        yield (variable,), np.where(other, math.inf, 0.0)


def follows(chosen: Mapping[Node, Strategy], asked: Mapping[Node, Strategy]) -> bool:
    """Tell whether a plan has the strategies that were asked for."""
    return all(_is_like(chosen[node], strategy) for node, strategy in asked.items() if node in chosen)


def _is_like(strategy: Strategy, asked: Strategy) -> bool:
    """Tell whether a strategy is the one asked for: of operands that are converted meanwhile, and in any order of shards."""
    if strategy.form != asked.form or _unordered(strategy.gives) != _unordered(asked.gives):
        return False
    pairs = zip(strategy.needs.values(), asked.needs.values(), strict=True)
    return all(_unordered(first) == _unordered(second) for first, second in pairs)


def _unordered(layout: Layout) -> Layout:
    """Return a layout without the order of its shards."""
    return Layout({axis: replace(kind, order="") for axis, kind in layout.types})
