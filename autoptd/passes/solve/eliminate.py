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
# Entries of a table. A search runs the elimination many times, so its tables must be smaller.
LARGEST_TABLE = 4_000_000
LARGEST_TABLE_OF_SEARCH = 100_000
MAX_ROUNDS = 12
MAX_IDLE_ROUNDS = 3


class TableTooLarge(PlanError):
    """The factors hang together too closely to be minimised exactly."""

    @classmethod
    def of_solver(cls) -> TableTooLarge:
        """Make the error for a search that found no possible answer."""
        fact = "its operators hang together too closely to find how they are split"
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
    answer, most_held, idle_rounds = [0] * len(choices), 0, 0
    times_held = Counter[int]()
    for _ in range(MAX_ROUNDS):
        search = _Elimination(choices, factors, LARGEST_TABLE_OF_SEARCH)
        new = search.run(answer, times_held)
        times_held.update(search.held)
        most_held = max(most_held, len(search.held))
        idle_rounds = 0 if price(new, factors) < price(answer, factors) else idle_rounds + 1
        # Not worse than the answer before: its choices were open to this round, too.
        answer = new
        if idle_rounds == MAX_IDLE_ROUNDS:
            break
    if math.isinf(price(answer, factors)):
        raise TableTooLarge.of_solver()
    return answer, most_held


def price(answer: Sequence[int], factors: list[Factor]) -> float:
    """Sum the entries of all tables at an answer."""
    return sum(entry_of(factor, answer) for factor in factors)


def entry_of(factor: Factor, answer: Sequence[int]) -> float:
    """Return the entry of a factor's table at an answer."""
    names, table = factor
    return float(table[tuple(answer[i] for i in names)])


class _Elimination:
    """One run: `pool` has the factors that are left by their numbers, `touching` the numbers of those of a variable."""

    def __init__(self, choices: list[int], factors: list[Factor], largest: int) -> None:
        self.choices, self.largest = choices, largest
        self.pool: dict[int, Factor] = {}
        self.touching: dict[int, set[int]] = defaultdict(set)
        for i, factor in enumerate(factors):
            self.pool[i] = _without_decided(factor, choices)
            for variable in self.pool[i][0]:
                self.touching[variable].add(i)
        self.next_number = len(factors)
        self.held: set[int] = set()
        # (entries of the table that eliminating it takes, variable); entries get stale as neighbours change.
        self.heap = [(self.size(variable), variable) for variable in range(len(choices))]
        heapq.heapify(self.heap)

    def near(self, variable: int) -> set[int]:
        """Return the variables that share a factor with `variable`, and itself."""
        neighbours = {variable}
        for i in self.touching[variable]:
            neighbours.update(self.pool[i][0])
        return neighbours

    def size(self, variable: int) -> int:
        """Return the entries of the table that eliminating `variable` takes."""
        return math.prod(self.choices[other] for other in self.near(variable))

    def run(self, known: list[int] | None, times: Mapping[int, int] | None = None) -> list[int]:
        """Decide all variables; those that must be held keep their choice of `known` (without it: TableTooLarge).

        `times` says how often each was held before.
        """
        order: list[tuple[int, list[int], np.ndarray]] = []
        done: set[int] = set()
        while self.heap:
            queued_size, variable = heapq.heappop(self.heap)
            if variable in done:
                continue
            # Smallest table first: the greedy order; on a chain of layers the tables stay those of one layer.
            size = self.size(variable)
            # Its neighbourhood grew since it was queued.
            if size > queued_size:
                heapq.heappush(self.heap, (size, variable))
                continue
            if size > self.largest:
                if known is None:
                    raise TableTooLarge("solver", f"a table of {size} entries is needed", "t=1")
                self._hold(self._next_to_hold(done, times or {}), known)
                heapq.heappush(self.heap, (self.size(variable), variable))
                continue
            done.add(variable)
            if variable in self.held:
                continue
            touched = sorted(self.touching[variable])
            near, best, best_choice = _eliminate(variable, self.choices, [self.pool[i] for i in touched])
            order.append((variable, near, best_choice))
            # The variable is gone: what is left is its best cost for every choice of its neighbours.
            self._replace(touched, [(tuple(near), best)] if near else [])
        answer = [0] * len(self.choices)
        if known is not None:
            for variable in self.held:
                answer[variable] = known[variable]
        # Variables eliminated later were neighbours of the earlier ones: decide backwards.
        for variable, near, best_choice in reversed(order):
            answer[variable] = int(best_choice[tuple(answer[other] for other in near)])
        return answer

    def _next_to_hold(self, done: set[int], times: Mapping[int, int]) -> int:
        """Choose an open variable: the one held least often so far, of these the one with the most neighbours."""
        left = [other for other in range(len(self.choices)) if other not in done and other not in self.held]
        return min(left, key=lambda other: (times.get(other, 0), -len(self.near(other)), other))

    def _hold(self, variable: int, known: list[int]) -> None:
        """Take the variable out of all factors, at its known choice."""
        self.held.add(variable)
        touched = sorted(self.touching[variable])
        sliced = []
        for i in touched:
            names, table = self.pool[i]
            dim = names.index(variable)
            others = (*names[:dim], *names[dim + 1 :])
            sliced.append((others, table.take(known[variable], dim)))
        self._replace(touched, sliced)

    def _replace(self, old: list[int], new: list[Factor]) -> None:
        for i in old:
            for other in self.pool.pop(i)[0]:
                self.touching[other].discard(i)
        changed: set[int] = set()
        for factor in new:
            self.pool[self.next_number] = factor
            changed.update(factor[0])
            for other in factor[0]:
                self.touching[other].add(self.next_number)
            self.next_number += 1
        for other in sorted(changed):
            heapq.heappush(self.heap, (self.size(other), other))


def _without_decided(factor: Factor, choices: list[int]) -> Factor:
    """Drop the variables with one choice: read by many layers, they would make all of these neighbours."""
    variables, table = factor
    undecided = tuple(variable for variable in variables if choices[variable] > 1)
    return undecided, table.reshape([choices[variable] for variable in undecided])


def _eliminate(
    variable: int, choices: list[int], factors: list[Factor]
) -> tuple[list[int], np.ndarray, np.ndarray]:
    """Sum the factors that touch `variable` and minimise it out: (neighbours, least cost, which choice)."""
    near = sorted({other for variables, _ in factors for other in variables} - {variable})
    axes = [variable, *near]
    total = np.zeros([choices[other] for other in axes])
    # einsum by hand: transpose to the order of `axes`, broadcast over the rest, add.
    for variables, table in factors:
        present = [other for other in axes if other in variables]
        transposed = table.transpose([variables.index(other) for other in present])
        # A dim of size 1 for each axis that this factor does not have, so that it broadcasts.
        total = total + transposed.reshape([choices[other] if other in variables else 1 for other in axes])
    return near, total.min(0), total.argmin(0)
