"""A lower bound of a sum of tables, and the choices that no answer below a known cost can have.

In: choices and factors (`eliminate.py`), and the cost of an answer. Out: the bound, and for every variable the choices left.

Costs are moved from table to table, so that their sum stays the same for every answer, and the sum of the tables' smallest
entries rises: a lower bound (min-sum diffusion; Werner 2007, Kolmogorov 2006). A variable is visited by gathering what its
tables cost at each of its choices, and giving that back to the tables of variables that come later. What a choice costs at
least, with all that is bound elsewhere, is known at that moment: where it exceeds the known cost the choice is dropped.

    bound, left = tighten([2, 2], factors, cost=3.0)
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from autoptd.passes.solve.eliminate import Factor

SWEEPS = 30
# Sweeps that raise the bound by less than this part are not worth their time.
LEAST_RISE = 1e-6
# Costs are whole numbers below 2^53; what is moved is not.
ROUNDING = 1e-9


def tighten(
    choices: Sequence[int],
    factors: Sequence[Factor],
    cost: float,
    order: Sequence[int] = (),
    sweeps: int = SWEEPS,
) -> tuple[float, list[np.ndarray]]:
    """Return a lower bound of the least cost, and the choices that an answer of at most `cost` may have.

    Variables are visited in an `order`, there and back: along the model the bound rises fastest.
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
    """The tables as they are moved: `own` of one variable, `tables` of several, and which choices are left."""

    def __init__(
        self, choices: Sequence[int], factors: Sequence[Factor], cost: float, order: Sequence[int]
    ) -> None:
        self.cost, self.order = cost, order
        self.place = {variable: i for i, variable in enumerate(order)}
        # No answer of this cost has a dearer entry, and infinities cannot be moved.
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
        # What each table adds to the bound.
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
        """Gather the costs of a variable, drop its choices that are too dear, and give the costs on; return the bound."""
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
        """Tell whether a table has a variable that is visited after this one."""
        places = [self.place[name] for name in self.names[i]]
        return max(places) > self.place[variable] if is_up else min(places) < self.place[variable]


__all__ = ["tighten"]
