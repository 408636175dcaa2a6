"""What the best plan with another strategy would cost more: the alternatives of a node.

In: the solver's problem with its answer, and a node. Out: its strategies with their extra seconds.

    alternatives(problem, c_fc)[1].seconds              # 6.1e-05: of the second best
    cheapest_with(problem, loss, lambda strategy: ...)  # 3e-06: of the best that the function accepts
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from torch.fx import Node

from autoptd.passes.solve.eliminate import TableTooLarge, minimize
from autoptd.passes.solve.problem import Problem
from autoptd.passes.solve.strategy import Strategy


@dataclass(frozen=True)
class Alternative:
    """A strategy of a node, and the extra cost of the best plan with it, in seconds per microbatch."""

    strategy: Strategy
    seconds: float
    is_chosen: bool


def alternatives(problem: Problem, node: Node) -> list[Alternative]:
    """Return all strategies of `node`: the chosen one, then the others by price; of tied layers, those of the first.

    The price is infinite where no plan has the strategy, and nan where none was found. Every alternative solves the model
    again.
    """
    variable = problem.variable[node]
    chosen = problem.answer[variable]
    ordered = []
    for i, strategy in enumerate(problem.strategies.alike(node)):
        extra = 0.0 if i == chosen else _extra_seconds(problem, variable, i)
        ordered.append(Alternative(strategy, extra, i == chosen))
    ordered.sort(key=lambda other: (not other.is_chosen, math.isnan(other.seconds), other.seconds))
    return ordered


def cheapest_with(problem: Problem, node: Node, accepts: Callable[[Strategy], bool]) -> float:
    """Return the least extra seconds of a strategy of `node` that `accepts` takes; infinite without one, nan if not found."""
    variable, least = problem.variable[node], math.inf
    for i, strategy in enumerate(problem.strategies[node]):
        if i == problem.answer[variable] or not accepts(strategy):
            continue
        extra = _extra_seconds(problem, variable, i)
        if math.isnan(extra):
            return extra
        least = min(least, extra)
    return least


def _extra_seconds(problem: Problem, variable: int, choice: int) -> float:
    """Return the extra seconds per layer of the best plan with a choice; infinite where there is none, nan if not found."""
    # One more factor forbids all other choices; everything else is solved again, at its best.
    only = np.full(problem.choices[variable], math.inf)
    only[choice] = 0.0
    try:
        answer = minimize(problem.choices, [*problem.factors, ((variable,), only)])
    except TableTooLarge:
        return math.nan
    if answer[variable] != choice:
        return math.inf
    picoseconds = problem.price(answer) - problem.price(problem.answer)
    # The number of nodes that share the variable: one in each of the tied layers.
    layers = Counter(problem.variable.values())[variable]
    return picoseconds * 1e-12 / layers
