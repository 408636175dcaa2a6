"""Assign one mesh axis: a type over it for every value, and for every operator the letter that it is split by.

In: a graph with named axes, and a `Splitter`, which tells what may be split. Out: an `Assignment`, and the notes of the graph.

Every operator and parameter has a variable, every edge a table (`problem.py`), and the sum of the tables is minimized exactly
(`minimize.py`). Values that depend on no parameter (ids, masks, tables of sines) have no variable: they are computed whole, and
sliced for operators that need them split. Ties are broken by order: every list has a fixed one, whole strategies first, and the
lower index wins.
"""

from __future__ import annotations

from collections import Counter
from copy import copy
from functools import partial

from torch.fx import Graph, Node

from autoptd.ir import markers
from autoptd.ir.notes import note
from autoptd.passes.ops.costs import conversion_seconds
from autoptd.passes.solve.assignment import Assignment
from autoptd.passes.solve.minimize import TableTooLarge
from autoptd.passes.solve.prices import AxisPrices, edge_price
from autoptd.passes.solve.problem import Asked, Problem, Solved, follows, solve_tied
from autoptd.passes.solve.shard_pins import Pins, refuse_conflict
from autoptd.passes.solve.splits import Splitter
from autoptd.passes.solve.strategies import strategies_of
from autoptd.passes.solve.ties import Strategy, Ties, find_ties


def assign_tensor(graph: Graph, splitter: Splitter, asked: Asked = None) -> Assignment:
    """Solve the assignment over an axis, and fill `layout`, `forms` and `why` of every node that depends on parameters.

    Repeated layers get one answer (`ties.py`), and the emitted program has them once. `asked` are strategies that were found
    over several axes together; everything else is solved around them. Raises PlanError if no plan keeps all pins, or none was
    found.
    """
    if asked:
        solution = _try_graph(graph, splitter, asked)
        if solution.problem.is_possible and follows(_chosen(solution.problem), asked):
            return write_solved(solution, splitter)
    return write_solved(_solve_graph(graph, splitter), splitter)


def write_solved(solved: Solved, splitter: Splitter) -> Assignment:
    """Fill `layout`, `forms` and `why` of every node that has a strategy."""
    problem, shared_conversions, entries, enters = solved
    chosen = _chosen(problem)
    # Only now, so that searching among plans (votes, pins) leaves no trace in the notes.
    for node, strategy in chosen.items():
        record = note(node)
        record.layout = record.layout.replacing(splitter.axis, strategy.gives)
        # A conversion over another axis keeps its own reason.
        if node.target not in markers.PLACED:
            is_other = record.why and strategy.why != record.why
            record.why = f"{record.why}; over {splitter.axis} {strategy.why}" if is_other else strategy.why
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


def find_plan(graph: Graph, splitter: Splitter) -> dict[Node, Strategy]:
    """Return the strategies of the cheapest plan, without writing them to the notes."""
    return _chosen(_solve_graph(graph, splitter).problem)


def _chosen(problem: Problem) -> dict[Node, Strategy]:
    return {node: problem.strategies.of(node, problem.answer[i]) for node, i in problem.variable.items()}


def _solve_graph(graph: Graph, splitter: Splitter) -> Solved:
    """Solve; PlanError if no plan keeps all pins."""
    solution = _try_graph(graph, splitter)
    if solution.problem.is_possible:
        return solution
    if not splitter.pins:
        raise TableTooLarge.of_solver()

    def is_possible(pins: Pins) -> bool:
        # A shallow copy: axes and factors, which take long to compute, do not depend on pins.
        trial = copy(splitter)
        trial.pins = pins
        return _try_graph(graph, trial).problem.is_possible

    raise refuse_conflict(splitter.pins, is_possible)


def _try_graph(graph: Graph, splitter: Splitter, asked: Asked = None) -> Solved:
    """Solve; if no plan is possible, the answer has an infinite price."""
    solved = [node for node in graph.nodes if splitter.decides(node) and node.op != "output"]
    ways = {node: splitter.ways(node) for node in solved if node.op == "call_function"}
    ties, prices = find_ties(graph, ways, splitter.facts), AxisPrices(splitter)
    try:
        solution = solve_tied(solved, strategies_of(splitter, ties.same), prices, ties, asked=asked)
        # Pins may come from a plan that was found by votes, which tie no layers: try without ties.
        if splitter.pins and not solution.problem.is_possible:
            solution = solve_tied(solved, strategies_of(splitter, {}), prices, Ties())
        return solution
    except TableTooLarge:
        return _solve_by_votes(solved, prices)


def _solve_by_votes(solved: list[Node], prices: AxisPrices) -> Solved:
    """Solve a problem whose tables get too large because many layers read the same parameters.

    The readers of such a parameter vote on its type, which is then fixed. If some reader cannot use it, it is whole instead.
    """
    strategies = strategies_of(prices.splitters[0], {})
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
        # Every round makes at least one more parameter whole, so the loop ends.
        strategies |= {node: whole[node] for node in left}
