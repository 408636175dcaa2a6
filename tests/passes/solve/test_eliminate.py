"""The exact solver against trying every choice."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from autoptd.passes.solve import minimize as minimizer
from autoptd.passes.solve.minimize import Factor, TableTooLarge, minimize, minimize_nearly


def cost(answer: tuple[int, ...], factors: list[Factor]) -> float:
    return sum(float(table[tuple(answer[one] for one in variables)]) for variables, table in factors)


def random_problem(seed: int) -> tuple[list[int], list[Factor]]:
    """Up to seven variables; small whole costs, so that ties are common, and some choices that are forbidden."""
    draw = np.random.default_rng(seed)
    choices = [int(one) for one in draw.integers(1, 4, draw.integers(1, 8))]
    factors: list[Factor] = []
    for _ in range(draw.integers(1, 12)):
        arity = int(draw.integers(1, min(3, len(choices)) + 1))
        variables = tuple(int(one) for one in draw.permutation(len(choices))[:arity])
        table = draw.integers(0, 5, [choices[one] for one in variables]).astype(float)
        table[draw.random(table.shape) < 0.05] = math.inf
        factors.append((variables, table))
    return choices, factors


@pytest.mark.parametrize("seed", range(150))
def test_equal_to_brute_force(seed: int) -> None:
    choices, factors = random_problem(seed)
    answer = tuple(minimize(choices, factors))
    assert all(0 <= one < count for one, count in zip(answer, choices, strict=True))
    best = min(cost(one, factors) for one in itertools.product(*map(range, choices)))
    assert cost(answer, factors) == best


def test_ties_go_to_the_lower_choice() -> None:
    flat = np.zeros((3, 3))
    assert minimize([3, 3, 3], [((0, 1), flat), ((1, 2), flat)]) == [0, 0, 0]
    agree = 1.0 - np.eye(3)
    assert minimize([3, 3, 3], [((0, 1), agree), ((1, 2), agree)]) == [0, 0, 0]


@pytest.mark.parametrize("seed", range(20))
def test_the_order_of_factors_does_not_change_the_cost(seed: int) -> None:
    choices, factors = random_problem(seed)
    there, back = minimize(choices, factors), minimize(choices, factors[::-1])
    assert cost(tuple(there), factors) == cost(tuple(back), factors)
    assert there == minimize(choices, list(factors))


def test_axes_of_a_table_follow_the_factor() -> None:
    table = np.array([[9.0, 9.0, 0.0], [9.0, 9.0, 9.0]])
    assert minimize([2, 3], [((0, 1), table)]) == [0, 2]
    assert minimize([3, 2], [((1, 0), table)]) == [2, 0]


def test_a_long_chain_is_exact() -> None:
    """400 variables: the least cost is that of dynamic programming."""
    draw = np.random.default_rng(0)
    tables = [draw.random((5, 5)) for _ in range(399)]
    best = np.zeros(5)
    for table in tables:
        best = (best[:, None] + table).min(0)
    factors: list[Factor] = [((i, i + 1), table) for i, table in enumerate(tables)]
    answer = minimize([5] * 400, factors)
    assert cost(tuple(answer), factors) == pytest.approx(best.min(), abs=1e-9)


def test_a_decided_variable_does_not_tie_its_readers_together() -> None:
    """Variables of one choice, each read by three chains: a parameter that layers share, once its type is fixed."""
    draw = np.random.default_rng(0)
    count, chains = 8, [range(8 * k, 8 * k + 8) for k in range(3)]
    factors: list[Factor] = [
        (tuple(chain[i : i + 4]), draw.random((5,) * 4)) for chain in chains for i in range(count - 3)
    ]
    tied: list[Factor] = [((24 + i, chain[i]), draw.random((1, 5))) for i in range(count) for chain in chains]
    alone: list[Factor] = [((one,), table[0]) for (_, one), table in tied]
    assert minimize([5] * 24 + [1] * count, factors + tied)[:24] == minimize([5] * 24, factors + alone)


def test_a_table_that_is_too_large_is_refused() -> None:
    pairs = itertools.combinations(range(14), 2)
    factors = [(pair, np.ones((4, 4))) for pair in pairs]
    with pytest.raises(TableTooLarge, match="solver"):
        minimize([4] * 14, factors)
    assert minimize_nearly([4] * 14, factors)[0] == [0] * 14


@pytest.mark.parametrize("seed", range(8))
def test_a_search_is_near_where_nothing_else_fits(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for small tables only: deterministic, never worse than the first choices, near to the least cost."""
    draw = np.random.default_rng(seed)
    pairs = list(itertools.combinations(range(8), 2))
    factors: list[Factor] = [(pair, draw.integers(0, 9, (3, 3)).astype(float)) for pair in pairs]
    exact, searched = minimize_nearly([3] * 8, factors)
    assert searched == 0 and exact == minimize([3] * 8, factors)
    monkeypatch.setattr(minimizer, "LARGEST_TABLE", 30)
    monkeypatch.setattr(minimizer, "LARGEST_TABLE_OF_SEARCH", 30)
    found, searched = minimize_nearly([3] * 8, factors)
    assert searched > 0 and (found, searched) == minimize_nearly([3] * 8, factors)
    least, most = cost(tuple(exact), factors), cost((0,) * 8, factors)
    assert least <= cost(tuple(found), factors) <= (least + most) / 2


def test_a_search_goes_around_what_is_forbidden() -> None:
    """The first choices are infinite: pinned parameters."""
    pairs = list(itertools.combinations(range(14), 2))
    factors: list[Factor] = [(pair, np.ones((4, 4))) for pair in pairs]
    found, _ = minimize_nearly([4] * 14, [*factors, ((3,), np.array([math.inf, 5.0, 1.0, 2.0]))])
    assert found == [0, 0, 0, 2] + [0] * 10
    never: Factor = ((3,), np.full(4, math.inf))
    with pytest.raises(TableTooLarge, match="too densely"):
        minimize_nearly([4] * 14, [*factors, never])
