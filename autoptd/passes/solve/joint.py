"""Minimise a sum of tables whose choices are pairs, one part over each of two axes: never dearer than one axis after the other.

In: choices and factors (`eliminate.py`), and the parts of every choice. Out: `Answer`: choices, their cost, those of both
sequential orders, and a lower bound of the least cost.

1. One axis is solved as if it were alone, then the other with that given, in both orders.
2. From the cheaper one on, each axis is solved again with the other given, until the cost does not fall.
3. Choices that no cheaper answer can have are dropped (`lower_bound.py`); what is left is solved at once, by elimination.
   Where that takes too large tables, the answer of 2 stays, and the lower bound says by how much it may be off.

    answer = minimize_pairs(pair, alone, ("first", "second"))
    answer.cost, answer.bound, answer.sequential["first"]
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from torch.fx import Node

from autoptd.passes.solve.assign import Solved
from autoptd.passes.solve.eliminate import Factor, TableTooLarge, minimize, price
from autoptd.passes.solve.lower_bound import tighten
from autoptd.passes.solve.strategy import Strategy

PICOSECONDS_PER_MICROSECOND = 1e6

# Choices that are left of every variable.
Left = Sequence[np.ndarray]
# An answer, None where there is none, and its cost.
Found = tuple[list[int] | None, float]


@dataclass(frozen=True)
class Answer:
    """An answer to a sum of tables, in its units, with what is known of the least one.

    `sequential`: the least cost with the choices of one part fixed first, by the name of that part; infinite where there is
    none. `bound` is a lower bound, equal to the cost where the answer is exact.
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
        """By which part of it the cost may exceed the least one."""
        return (self.cost - self.bound) / self.cost if self.cost else 0.0


@dataclass(frozen=True)
class Pair:
    """The two problems in one: for every variable the parts (over either axis) of each choice, where it has parts."""

    choices: list[int]
    factors: list[Factor]
    parts: dict[int, np.ndarray]  # [choice, axis]
    order: list[int]

    def everything(self) -> list[np.ndarray]:
        return [np.arange(count) for count in self.choices]

    def with_part(self, axis: int, part: dict[int, int]) -> list[np.ndarray] | None:
        """Return the choices that have the given parts over one axis; None where a variable has none."""
        left = self.everything()
        for variable, wanted in part.items():
            left[variable] = np.flatnonzero(self.parts[variable][:, axis] == wanted)
            if not len(left[variable]):
                return None
        return left

    def part_of(self, axis: int, answer: Sequence[int]) -> dict[int, int]:
        """Return the parts of an answer over one axis."""
        return {variable: int(parts[answer[variable], axis]) for variable, parts in self.parts.items()}


def minimize_pairs(pair: Pair, alone: Sequence[dict[int, int]], names: Sequence[str]) -> Answer:
    """Minimise over pairs; `alone` are the parts of either axis where it is solved first.

    TableTooLarge where neither order can be solved.
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
    """Return the cheapest answer of the choices that are left, with its cost: infinite where there is none."""
    if left is None:
        return None, math.inf
    narrow = minimize([len(each) for each in left], list(narrowed(pair.factors, left)))
    answer = [int(each[i]) for each, i in zip(left, narrow, strict=True)]
    cost = price(answer, pair.factors)
    return (answer, cost) if math.isfinite(cost) else (None, math.inf)


def narrowed(factors: Iterable[Factor], left: Left) -> Iterator[Factor]:
    """Yield the tables of the choices that are left."""
    for names, table in factors:
        yield names, table[np.ix_(*(left[name] for name in names))] if names else table


def _descend(pair: Pair, answer: list[int], cost: float) -> tuple[list[int], float]:
    """Solve each axis with the other one given, in turns, until the cost does not fall."""
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
    """Find the least cost of all pairs, which is at most `cost`, or a bound of it."""
    bound, left = tighten(pair.choices, pair.factors, cost, pair.order)
    if bound < cost:
        try:
            found, new = minimize_left(pair, left)
        except TableTooLarge:
            return Answer(answer, cost, sequential, bound)
        # Take the first of equal answers, so that a plan known to work stays.
        if found is not None and new < cost:
            answer, cost = found, new
    return Answer(answer, cost, sequential, cost)


@dataclass(frozen=True)
class Joint:
    """What was solved over the axis of weights and that of tokens; `answer` says what both cost, in picoseconds."""

    answer: Answer
    of_weights: Solved
    of_tokens: dict[Node, Strategy]

    @property
    def text(self) -> str:
        """Say what both cost together, what each order would, and whether less is possible."""
        answer, orders = self.answer, []
        for axis, cost in answer.sequential.items():
            more = f"+{100 * (cost / answer.cost - 1):.2f}%" if math.isfinite(cost) else "no plan"
            orders.append(f"{axis} first {more}")
        proof = f"at most {100 * answer.gap:.2g}% above the least"
        if answer.is_exact:
            proof = "exact, no other plan costs less"
        price = f"{answer.cost / PICOSECONDS_PER_MICROSECOND:.6g} us"
        return f"over {' and '.join(answer.sequential)} together {price}: {proof}; {', '.join(orders)}"


__all__ = ["Answer", "Joint", "Pair", "minimize_pairs", "narrowed"]
