"""Find the types over tp and over cp together: one strategy over each for every operator, at the least price of all pairs.

In: a graph without types, and what each axis may split of it. Out: `Joint`: what was solved over tp, with its tables where the
types over cp are given; the strategies over cp; and what both cost together. The conversions over cp, and their places among
those over tp, are found behind these (`split_tokens.py`).

    joint = solve_pairs(graph, weights, tokens)
    write_solved(joint.of_weights, weights)
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from torch.fx import Graph, Node

from autoptd.ir.layout import Layout
from autoptd.passes.solve.assign import Solved, solve_tied
from autoptd.passes.solve.edges import TypeVariable
from autoptd.passes.solve.eliminate import Factor
from autoptd.passes.solve.joint import Answer, Joint, Pair, minimize_pairs, narrowed
from autoptd.passes.solve.pairs import PairPrices, Pairs
from autoptd.passes.solve.prices import AxisPrices
from autoptd.passes.solve.problem import Problem, Variables
from autoptd.passes.solve.strategies import Splitter
from autoptd.passes.solve.tied import Strategies
from autoptd.passes.solve.ties import find_ties
from autoptd.passes.solve.tokens import TokenSplitter

# Of the two parts of a choice.
FIRST, SECOND = 0, 1


def solve_pairs(graph: Graph, weights: Splitter, tokens: TokenSplitter) -> Joint:
    """Solve over both axes; TableTooLarge where not even one axis can be solved with the other given."""
    solved = [node for node in graph.nodes if weights.decides(node) and node.op != "output"]
    splits = {
        node: weights.splits(node) + tokens.splits(node) for node in solved if node.op == "call_function"
    }
    ties = find_ties(graph, splits, weights.facts, weights.pins)
    pairs = Pairs(weights, tokens, ties.same)
    variables = Variables(solved, pairs, PairPrices(pairs), ties)
    for node in solved:
        variables.add(node, may_share=True)
    # By variable: the node that is decided with it.
    heads = dict(enumerate(variables.heads))
    parts = {variable: np.array(pairs.parts[node]) for variable, node in heads.items()}
    alone = []
    for strategies, splitter in zip(pairs.over, (weights, tokens), strict=True):
        problem = solve_tied(solved, strategies, AxisPrices(splitter), ties).problem
        alone.append({variable: problem.answer[variable] for variable in heads})
    factors = [*variables.all_factors(), *_asked(tokens, heads, parts, alone[FIRST])]
    pair = Pair(variables.choices, factors, parts, _order(variables))
    answer = minimize_pairs(pair, alone, (weights.axis, tokens.axis))
    of_tokens = {}
    for node in solved:
        variable = variables.variable[node]
        of_tokens[node] = pairs.over[SECOND].of(node, parts[variable][answer.choices[variable], SECOND])
    return Joint(answer, _of_weights(pair, answer, variables, pairs), of_tokens)


def _asked(
    tokens: TokenSplitter, heads: dict[int, Node], parts: dict[int, np.ndarray], alone: dict[int, int]
) -> Iterator[Factor]:
    """Yield tables that keep attention split over tp as without cp, where the user says how cp splits it.

    What they ask for is then refused if it does not go with that, and nothing else gives way for it.
    """
    if tokens.context == "auto":
        return
    for variable, node in heads.items():
        if tokens.multiplies_activations(node) and tokens.reads_tokens(node):
            yield (variable,), np.where(parts[variable][:, FIRST] == alone[variable], 0.0, math.inf)


def _order(variables: Variables) -> list[int]:
    """Return all variables along the model: entries and shared conversions stand behind the value that they are of."""
    place = {i: float(i) for i in range(len(variables.choices))}
    for behind, chosen in ((0.25, variables.entries), (0.5, variables.shared)):
        for node, (i, _) in chosen.items():
            place[i] = variables.variable[node] + behind
    return sorted(place, key=place.__getitem__)


def _of_weights(pair: Pair, answer: Answer, variables: Variables, pairs: Pairs) -> Solved:
    """Return the problem over tp that is left where the types over cp are given, with its answer."""
    left = pair.with_part(SECOND, pair.part_of(SECOND, answer.choices))
    assert left is not None
    ties, strategies = variables.ties, Strategies(pairs.weights, variables.ties.same)
    for variable, node in enumerate(variables.heads):
        own = pairs.over[FIRST][node]
        strategies[node] = [own[part] for part in pair.parts[variable][left[variable], FIRST]]
    places = [int(np.flatnonzero(each == i)[0]) for each, i in zip(left, answer.choices, strict=True)]
    choices = [len(each) for each in left]
    problem = Problem(variables.variable, strategies, choices, list(narrowed(pair.factors, left)), places)

    def types(chosen: dict[Node, TypeVariable]) -> dict[Node, Layout]:
        return {
            node: kinds[answer.choices[i]].over(pairs.weights.axis) for node, (i, kinds) in chosen.items()
        }

    enters = {node: ties.enters[node][0] for node in variables.entries}
    return Solved(problem, types(variables.shared), types(variables.entries), enters)


__all__ = ["solve_pairs"]
