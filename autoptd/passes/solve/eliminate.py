"""Minimise a sum of tables by variable elimination (smallest table first): exactly, or nearly where tables get too large.

In: the number of choices of every variable, and factors: tuples of variables with a table of costs. Out: the choice of every
variable with the least total cost. Ties go to the lower choice of the variable that is decided first, so the answer is fixed.

    minimize([2, 2], [((0,), np.array([1.0, 0.0])), ((0, 1), np.array([[0.0, 9.0], [9.0, 0.0]]))])  ==  [1, 1]
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from autoptd.errors import PlanError

Factor = tuple[tuple[int, ...], np.ndarray]
LARGEST_TABLE = 4_000_000
LARGEST_OF_SEARCH = 100_000  # entries of a table, where elimination is run again and again
ROUNDS = 12


class TableTooLarge(PlanError):
    """The factors hang together too closely to be minimised exactly."""

    @classmethod
    def of_solver(cls) -> TableTooLarge:
        """What is said where no possible answer was found."""
        fact = "its operators hang together too closely to find how tp splits them"
        return cls("solver", fact, "t=1, or no pinned parameters")


def minimize(choices: list[int], factors: list[Factor]) -> list[int]:
    """Return the choices of least total cost; every factor's table has one axis per variable, in the order it names them."""
    return _Elimination(choices, factors, LARGEST_TABLE).run(None)


def minimize_nearly(choices: list[int], factors: list[Factor]) -> tuple[list[int], int]:
    """Return choices of least or nearly least cost, and how many variables a search decided (0: the cost is the least).

    The search begins with the first choice of every variable. In every round it holds as many variables as must be held for
    the tables to be small, the closest neighbours first, and decides all others together, at the least cost; the next round
    holds those first that were held the least. The cost never rises. PlanError where no round finds a finite one.
    """
    try:
        return minimize(choices, factors), 0
    except TableTooLarge:
        pass
    answer, most, idle = [0] * len(choices), 0, 0
    times = Counter[int]()
    for _ in range(ROUNDS):
        search = _Elimination(choices, factors, LARGEST_OF_SEARCH)
        found = search.run(answer, times)
        times.update(search.held)
        most = max(most, len(search.held))
        idle = 0 if price(found, factors) < price(answer, factors) else idle + 1
        answer = found
        if idle == 3:
            break
    if math.isinf(price(answer, factors)):
        raise TableTooLarge.of_solver()
    return answer, most


def price(answer: Sequence[int], factors: list[Factor]) -> float:
    """The cost of an answer."""
    return sum(float(table[tuple(answer[i] for i in names)]) for names, table in factors)


class _Elimination:
    """One run: `pool` has the factors that are left, `touching` those of every variable, by number."""

    def __init__(self, choices: list[int], factors: list[Factor], largest: int) -> None:
        self.choices, self.largest = choices, largest
        self.pool: dict[int, Factor] = {
            i: _without_decided(factor, choices) for i, factor in enumerate(factors)
        }
        self.touching: dict[int, set[int]] = defaultdict(set)
        for i, (variables, _) in self.pool.items():
            for variable in variables:
                self.touching[variable].add(i)
        self.fresh = len(factors)
        self.held: set[int] = set()
        self.heap = [(self.size(variable), variable) for variable in range(len(choices))]
        heapq.heapify(self.heap)

    def near(self, variable: int) -> set[int]:
        return {other for i in self.touching[variable] for other in self.pool[i][0]} | {variable}

    def size(self, variable: int) -> int:
        return math.prod(self.choices[other] for other in self.near(variable))

    def run(self, known: list[int] | None, times: Mapping[int, int] | None = None) -> list[int]:
        """Decide all variables; those that must be held keep their choice of `known` (without it: TableTooLarge).

        `times` says how often each was held before.
        """
        order: list[tuple[int, list[int], np.ndarray]] = []
        done: set[int] = set()
        while self.heap:
            seen_size, variable = heapq.heappop(self.heap)
            if variable in done:
                continue
            now = self.size(variable)
            if now > seen_size:  # its neighbourhood grew since it was queued
                heapq.heappush(self.heap, (now, variable))
                continue
            if now > self.largest:
                if known is None:
                    raise TableTooLarge("solver", f"a table of {now} entries is needed", "t=1")
                left = [one for one in range(len(self.choices)) if one not in done and one not in self.held]
                before = times or {}
                self._hold(min(left, key=lambda one: (before.get(one, 0), -len(self.near(one)), one)), known)
                heapq.heappush(self.heap, (self.size(variable), variable))
                continue
            done.add(variable)
            if variable in self.held:
                continue
            touched = sorted(self.touching[variable])
            near, best, arg = _eliminate(variable, self.choices, [self.pool[i] for i in touched])
            order.append((variable, near, arg))
            self._replace(touched, [(tuple(near), best)] if near else [])
        answer = [
            known[one] if known is not None and one in self.held else 0 for one in range(len(self.choices))
        ]
        for variable, near, arg in reversed(order):
            answer[variable] = int(arg[tuple(answer[other] for other in near)])
        return answer

    def _hold(self, variable: int, known: list[int]) -> None:
        """Take the variable out of all factors, at its known choice."""
        self.held.add(variable)
        touched = sorted(self.touching[variable])
        cut = []
        for names, table in (self.pool[i] for i in touched):
            at = names.index(variable)
            cut.append(((*names[:at], *names[at + 1 :]), table.take(known[variable], at)))
        self._replace(touched, cut)

    def _replace(self, old: list[int], new: list[Factor]) -> None:
        for i in old:
            for other in self.pool.pop(i)[0]:
                self.touching[other].discard(i)
        for factor in new:
            self.pool[self.fresh] = factor
            for other in factor[0]:
                self.touching[other].add(self.fresh)
            self.fresh += 1
        for other in sorted({other for factor in new for other in factor[0]}):
            heapq.heappush(self.heap, (self.size(other), other))


def _without_decided(factor: Factor, choices: list[int]) -> Factor:
    """A variable with one choice ties nobody together: many layers may read it."""
    variables, table = factor
    open_ones = tuple(one for one in variables if choices[one] > 1)
    return open_ones, table.reshape([choices[one] for one in open_ones])


def _eliminate(
    variable: int, choices: list[int], factors: list[Factor]
) -> tuple[list[int], np.ndarray, np.ndarray]:
    """Sum the factors that touch `variable` and minimise it out: (neighbours, least cost, which choice)."""
    near = sorted({other for variables, _ in factors for other in variables} - {variable})
    axes = [variable, *near]
    total = np.zeros([choices[other] for other in axes])
    for variables, table in factors:
        kept = [other for other in axes if other in variables]
        turned = table.transpose([variables.index(other) for other in kept])
        total = total + turned.reshape([choices[other] if other in variables else 1 for other in axes])
    return near, total.min(0), total.argmin(0)
