"""Minimise a sum of tables exactly, by variable elimination (smallest table first).

In: the number of choices of every variable, and factors: tuples of variables with a table of costs. Out: the choice of every
variable with the least total cost. Ties go to the lower choice of the variable that is decided first, so the answer is fixed.

    minimize([2, 2], [((0,), np.array([1.0, 0.0])), ((0, 1), np.array([[0.0, 9.0], [9.0, 0.0]]))])  ==  [1, 1]
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict

import numpy as np

from autoptd.errors import InternalError

Factor = tuple[tuple[int, ...], np.ndarray]
LARGEST_TABLE = 4_000_000


class TableTooLarge(InternalError):
    """The factors hang together too closely to be minimised exactly."""


def minimize(choices: list[int], factors: list[Factor]) -> list[int]:
    """Return the choices of least total cost; every factor's table has one axis per variable, in the order it names them."""
    pool: dict[int, Factor] = {i: _without_decided(factor, choices) for i, factor in enumerate(factors)}
    touching: dict[int, set[int]] = defaultdict(set)
    for i, (variables, _) in pool.items():
        for variable in variables:
            touching[variable].add(i)

    def size(variable: int) -> int:
        near = {other for i in touching[variable] for other in pool[i][0]} | {variable}
        return math.prod(choices[other] for other in near)

    heap = [(size(variable), variable) for variable in range(len(choices))]
    heapq.heapify(heap)
    order: list[tuple[int, list[int], np.ndarray]] = []
    done: set[int] = set()
    while heap:
        seen_size, variable = heapq.heappop(heap)
        if variable in done:
            continue
        now = size(variable)
        if now > seen_size:  # its neighbourhood grew since it was queued
            heapq.heappush(heap, (now, variable))
            continue
        if now > LARGEST_TABLE:
            raise TableTooLarge("solver", f"a table of {now} entries is needed")
        done.add(variable)
        near, best, arg = _eliminate(variable, choices, [pool[i] for i in sorted(touching[variable])])
        order.append((variable, near, arg))
        for i in list(touching[variable]):
            for other in pool.pop(i)[0]:
                touching[other].discard(i)
        if near:
            fresh = len(factors) + len(order)
            pool[fresh] = (tuple(near), best)
            for other in near:
                touching[other].add(fresh)
                heapq.heappush(heap, (size(other), other))
    answer = [0] * len(choices)
    for variable, near, arg in reversed(order):
        answer[variable] = int(arg[tuple(answer[other] for other in near)])
    return answer


def _without_decided(factor: Factor, choices: list[int]) -> Factor:
    """A variable with one choice ties nobody together: many layers may read it."""
    variables, table = factor
    open_ones = tuple(one for one in variables if choices[one] > 1)
    return open_ones, table.reshape([choices[one] for one in open_ones])


def _eliminate(variable: int, choices: list[int], factors: list[Factor]) -> tuple[list[int], np.ndarray, np.ndarray]:
    """Sum the factors that touch `variable` and minimise it out: (neighbours, least cost, which choice)."""
    near = sorted({other for variables, _ in factors for other in variables} - {variable})
    axes = [variable, *near]
    total = np.zeros([choices[other] for other in axes])
    for variables, table in factors:
        kept = [other for other in axes if other in variables]
        turned = table.transpose([variables.index(other) for other in kept])
        total = total + turned.reshape([choices[other] if other in variables else 1 for other in axes])
    return near, total.min(0), total.argmin(0)
