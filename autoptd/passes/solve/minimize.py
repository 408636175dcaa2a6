"""Minimize a sum of tables by variable elimination: exactly, or approximately if the tables get too large.

In: the number of choices of every variable, and factors: tuples of variables, each with a table of costs. Out: the choice of
every variable that minimizes the total cost. On ties, the variable that is decided first takes its lower choice, so the
answer is deterministic.

    minimize([2, 2], [((0,), np.array([1.0, 0.0])), ((0, 1), np.array([[0.0, 9.0], [9.0, 0.0]]))])  ==  [1, 1]

- `minimize` eliminates one variable after the other, smallest table first.
- `minimize_nearly` fixes some variables if the tables get too large, and improves the answer in rounds.
- `minimize_pairs` minimizes over choices that are pairs, one part for each of two mesh axes. Its cost is never higher than
  that of solving one axis after the other:
  1. One axis is solved as if it were alone, then the other with the first one fixed, in both orders.
  2. Starting from the cheaper of the two, each axis is solved again with the other one fixed, until the cost stops falling.
  3. Choices that no cheaper answer can have are dropped (`tighten`), and the rest is solved at once by elimination. If that
     takes too large tables, the answer of 2 stays, and the lower bound says by how much it may exceed the minimum.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autoptd.errors import PlanError

Factor = tuple[tuple[int, ...], np.ndarray]
# Choices that are left of every variable.
Left = Sequence[np.ndarray]
# An answer, None if there is none, and its cost.
Found = tuple[list[int] | None, float]
# Entries of a table. A search runs the elimination many times, so its tables must be smaller.
LARGEST_TABLE = 4_000_000
LARGEST_TABLE_OF_SEARCH = 100_000
MAX_ROUNDS = 12
MAX_IDLE_ROUNDS = 3


class TableTooLarge(PlanError):
    """The factors are too densely connected to be minimized exactly."""

    @classmethod
    def of_solver(cls) -> TableTooLarge:
        """Make the error for a search that found no feasible answer."""
        fact = "its operators are too densely connected for a split to be found"
        return cls("solver", fact, "t=1, or no pinned parameters")


def minimize(choices: list[int], factors: list[Factor]) -> list[int]:
    """Return the choices of least total cost; a factor's table has one axis for each of its variables, in their order."""
    return _Elimination(choices, factors, LARGEST_TABLE).run(None)


def minimize_nearly(choices: list[int], factors: list[Factor]) -> tuple[list[int], int]:
    """Return choices of least or nearly least cost, and how many variables a search decided (0: the cost is the minimum).

    The search starts from the first choice of every variable. Each round fixes as few variables as keep the tables small,
    those with the most neighbors first, and minimizes over all others together; the next round fixes those first that were
    fixed least often. The cost never rises. Raises PlanError if no round finds a finite one.
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
        # Not worse than the previous answer: this round could choose that one, too.
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
    """One run: `pool` has the remaining factors by number, `touching` the numbers of those that name a variable."""

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
        # (entries of the table that eliminating it takes, variable); entries get stale as neighbors change.
        self.heap = [(self.size(variable), variable) for variable in range(len(choices))]
        heapq.heapify(self.heap)

    def near(self, variable: int) -> set[int]:
        """Return `variable` and those that share a factor with it."""
        neighbors = {variable}
        for i in self.touching[variable]:
            neighbors.update(self.pool[i][0])
        return neighbors

    def size(self, variable: int) -> int:
        """Return the entries of the table that eliminating `variable` takes."""
        return math.prod(self.choices[other] for other in self.near(variable))

    def run(self, known: list[int] | None, times: Mapping[int, int] | None = None) -> list[int]:
        """Decide all variables; those that must be fixed keep their choice in `known` (without it: TableTooLarge).

        `times` counts how often each was fixed before.
        """
        order: list[tuple[int, list[int], np.ndarray]] = []
        done: set[int] = set()
        while self.heap:
            queued_size, variable = heapq.heappop(self.heap)
            if variable in done:
                continue
            # Smallest table first: along a chain of layers, tables stay as small as those of one layer.
            size = self.size(variable)
            # Its neighborhood grew since it was queued.
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
            # Its least cost for every choice of its neighbors replaces the variable.
            self._replace(touched, [(tuple(near), best)] if near else [])
        answer = [0] * len(self.choices)
        if known is not None:
            for variable in self.held:
                answer[variable] = known[variable]
        # Variables eliminated later were neighbors of the earlier ones: decide backwards.
        for variable, near, best_choice in reversed(order):
            answer[variable] = int(best_choice[tuple(answer[other] for other in near)])
        return answer

    def _next_to_hold(self, done: set[int], times: Mapping[int, int]) -> int:
        """Choose an open variable: the one fixed least often so far, of these the one with the most neighbors."""
        left = [other for other in range(len(self.choices)) if other not in done and other not in self.held]
        return min(left, key=lambda other: (times.get(other, 0), -len(self.near(other)), other))

    def _hold(self, variable: int, known: list[int]) -> None:
        """Fix the variable at its known choice, and remove it from all factors."""
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
    """Drop the variables with one choice: one that many layers read would make neighbors of all of them."""
    variables, table = factor
    undecided = tuple(variable for variable in variables if choices[variable] > 1)
    return undecided, table.reshape([choices[variable] for variable in undecided])


def _eliminate(
    variable: int, choices: list[int], factors: list[Factor]
) -> tuple[list[int], np.ndarray, np.ndarray]:
    """Sum the factors that name `variable` and minimize over it: (neighbors, least cost, its choice)."""
    near = sorted({other for variables, _ in factors for other in variables} - {variable})
    axes = [variable, *near]
    total = np.zeros([choices[other] for other in axes])
    # einsum by hand: transpose to the order of `axes`, broadcast over the rest, add.
    for variables, table in factors:
        present = [other for other in axes if other in variables]
        transposed = table.transpose([variables.index(other) for other in present])
        # A dim of size 1 for every axis that this factor does not have.
        total = total + transposed.reshape([choices[other] if other in variables else 1 for other in axes])
    return near, total.min(0), total.argmin(0)


SWEEPS = 30
# Sweeps stop once they raise the bound by less than this fraction.
LEAST_RISE = 1e-6
# Costs are whole numbers below 2^53, and exact; the shares that are moved between tables are rounded.
ROUNDING = 1e-9


def tighten(
    choices: Sequence[int],
    factors: Sequence[Factor],
    cost: float,
    order: Sequence[int] = (),
    sweeps: int = SWEEPS,
) -> tuple[float, list[np.ndarray]]:
    """Return a lower bound of the least cost, and the choices that an answer of at most `cost` may have.

    Costs are moved from table to table such that their sum stays the same for every answer, and the sum of the tables'
    minima, which is a lower bound, rises (min-sum diffusion; Werner 2007, Kolmogorov 2006). A visit to a variable gathers
    the costs of each of its choices from its tables, and distributes them to the tables of variables that come later. At
    that moment, a lower bound of every answer with a choice is known: if it exceeds `cost`, the choice is dropped.

    Variables are visited in `order`, forwards and backwards alternately: along the model, the bound rises fastest.
    """
    order = order or range(len(choices))
    bounds, before = _Bounds(choices, factors, cost, order), -math.inf
    for i in range(sweeps):
        bounds.sweep(is_up=i % 2 == 0)
        if bounds.bound >= cost or (i % 2 and bounds.bound - before < LEAST_RISE * cost):
            break
        before = bounds.bound if i % 2 else before
    return min(bounds.bound, cost), [np.flatnonzero(left) for left in bounds.left]


class _Bounds:
    """The moved tables: `own` of one variable, `tables` of several; and the choices that are left."""

    def __init__(
        self, choices: Sequence[int], factors: Sequence[Factor], cost: float, order: Sequence[int]
    ) -> None:
        self.cost, self.order = cost, order
        self.place = {variable: i for i, variable in enumerate(order)}
        # No answer of this cost has a larger entry, and infinities cannot be moved.
        dearest = 2 * cost + 1
        self.own = [np.zeros(count) for count in choices]
        self.left = [np.ones(count, dtype=bool) for count in choices]
        self.constant = 0.0
        self.names: list[tuple[int, ...]] = []
        self.tables: list[np.ndarray] = []
        self.touching: list[list[int]] = [[] for _ in choices]
        for names, table in factors:
            capped = np.minimum(table, dearest)
            if len(names) == 0:
                self.constant += float(capped)
            elif len(names) == 1:
                self.own[names[0]] = self.own[names[0]] + capped
            else:
                for name in names:
                    self.touching[name].append(len(self.tables))
                self.names.append(names)
                self.tables.append(capped.copy())
        # The contribution of each table to the bound.
        self.least = [float(table.min()) for table in self.tables]
        self.least_own = [float(table.min()) for table in self.own]

    @property
    def bound(self) -> float:
        total = self.constant + math.fsum(self.least) + math.fsum(self.least_own)
        return total - ROUNDING * self.cost

    def sweep(self, *, is_up: bool) -> None:
        """Visit every variable once."""
        bound = self.bound
        for variable in self.order if is_up else reversed(self.order):
            bound = self._visit(variable, bound, is_up=is_up)

    def _visit(self, variable: int, bound: float, *, is_up: bool) -> float:
        """Gather the costs of a variable, drop choices that cost too much, and distribute the costs; return the bound."""
        total, parts = self.own[variable], []
        for i in self.touching[variable]:
            names, table = self.names[i], self.tables[i]
            axis = names.index(variable)
            part = table.min(tuple(dim for dim in range(len(names)) if dim != axis))
            parts.append((i, axis, part))
            total = total + part
        before = self.least_own[variable] + sum(self.least[i] for i, _, _ in parts)
        lowest = float(total[self.left[variable]].min())
        bound += lowest - before
        dear = self.left[variable] & (bound - lowest + total > self.cost)
        if dear.any() and not dear[self.left[variable]].all():
            self.left[variable] &= ~dear
        dearest = 2 * self.cost + 1
        # To the tables of variables that are visited later; the last one keeps it.
        later = {i for i, _, _ in parts if self._has_later(i, variable, is_up=is_up)}
        share = total / len(later) if later else np.zeros_like(total)
        for i, axis, part in parts:
            given = share if i in later else np.zeros_like(total)
            given = np.where(self.left[variable], given - part, dearest)
            shape = [1] * self.tables[i].ndim
            shape[axis] = -1
            self.tables[i] += given.reshape(shape)
            self.least[i] = lowest / len(later) if i in later else 0.0
        self.own[variable] = np.where(self.left[variable], 0.0 if later else total, dearest)
        self.least_own[variable] = 0.0 if later else lowest
        return bound

    def _has_later(self, i: int, variable: int, *, is_up: bool) -> bool:
        """Tell whether a table names a variable that is visited after this one."""
        places = [self.place[name] for name in self.names[i]]
        return max(places) > self.place[variable] if is_up else min(places) < self.place[variable]


@dataclass(frozen=True)
class Answer:
    """An answer, with its cost and a lower bound of the least cost, equal to it if the answer is exact.

    `sequential`: the cost of solving one axis first, by its name; infinite if the other one then has no answer.
    """

    choices: list[int]
    cost: float
    sequential: dict[str, float]
    bound: float

    @property
    def is_exact(self) -> bool:
        """Whether no other answer costs less."""
        return self.bound >= self.cost

    @property
    def gap(self) -> float:
        """The fraction of the cost by which it may exceed the minimum."""
        return (self.cost - self.bound) / self.cost if self.cost else 0.0


@dataclass(frozen=True)
class Pair:
    """A problem over two axes: for every variable whose choices are pairs, both parts of each choice."""

    choices: list[int]
    factors: list[Factor]
    parts: dict[int, np.ndarray]  # [choice, axis]
    order: list[int]

    def with_part(self, axis: int, part: dict[int, int]) -> list[np.ndarray] | None:
        """Return the choices that have the given parts over one axis; None if a variable has none of them."""
        left = [np.arange(count) for count in self.choices]
        for variable, wanted in part.items():
            left[variable] = np.flatnonzero(self.parts[variable][:, axis] == wanted)
            if not len(left[variable]):
                return None
        return left

    def part_of(self, axis: int, answer: Sequence[int]) -> dict[int, int]:
        """Return the parts of an answer over one axis."""
        return {variable: int(parts[answer[variable], axis]) for variable, parts in self.parts.items()}


def minimize_pairs(pair: Pair, alone: Sequence[dict[int, int]], names: Sequence[str]) -> Answer:
    """Minimize over pairs; `alone` are the parts of each axis when it is solved alone.

    Raises TableTooLarge if neither order has an answer.
    """
    sequential, best, cost = {}, None, math.inf
    for axis, name in enumerate(names):
        found, sequential[name] = minimize_left(pair, pair.with_part(axis, alone[axis]))
        if sequential[name] < cost:
            best, cost = found, sequential[name]
    if best is None:
        raise TableTooLarge.of_solver()
    best, cost = _descend(pair, best, cost)
    return _minimize_all(pair, best, cost, sequential)


def minimize_left(pair: Pair, left: Left | None) -> Found:
    """Return the cheapest answer among the choices that are left, with its cost: None and infinity if there is none."""
    if left is None:
        return None, math.inf
    narrow = minimize([len(each) for each in left], list(narrowed(pair.factors, left)))
    answer = [int(each[i]) for each, i in zip(left, narrow, strict=True)]
    cost = price(answer, pair.factors)
    return (answer, cost) if math.isfinite(cost) else (None, math.inf)


def narrowed(factors: Iterable[Factor], left: Left) -> Iterator[Factor]:
    """Yield the factors, restricted to the choices that are left."""
    for names, table in factors:
        yield names, table[np.ix_(*(left[name] for name in names))] if names else table


def _descend(pair: Pair, answer: list[int], cost: float) -> tuple[list[int], float]:
    """Solve each axis with the other one fixed, alternately, until the cost stops falling."""
    axis, idle = 0, 0
    while idle < 2:
        found, new = minimize_left(pair, pair.with_part(axis, pair.part_of(axis, answer)))
        if found is not None and new < cost:
            answer, cost, idle = found, new, 0
        else:
            idle += 1
        axis = 1 - axis
    return answer, cost


def _minimize_all(pair: Pair, answer: list[int], cost: float, sequential: dict[str, float]) -> Answer:
    """Minimize over all pairs at once, or at least bound the minimum from below; it is at most `cost`."""
    bound, left = tighten(pair.choices, pair.factors, cost, pair.order)
    if bound < cost:
        try:
            found, new = minimize_left(pair, left)
        except TableTooLarge:
            return Answer(answer, cost, sequential, bound)
        # On equal cost, keep the answer that is known to work.
        if found is not None and new < cost:
            answer, cost = found, new
    return Answer(answer, cost, sequential, cost)
