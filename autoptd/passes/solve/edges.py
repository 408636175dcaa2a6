"""What it costs to bring a value to those that read it: the tables between the solver's variables.

In: a value, its readers, and their strategies. Out: `Factor`s (`eliminate.py`) over the variables of the value, of its
readers, and of its shared conversion or entry (`assign.py`). Costs are whole picoseconds, infinite where there is no such
conversion.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from torch.fx import Node

from autoptd.ir.layout import Layout
from autoptd.ir.machine import Machine
from autoptd.ir.notes import note, op_name, value
from autoptd.ir.operators.table import operator_of
from autoptd.ir.steps import Step
from autoptd.ir.types import R, ValueType, padded_size
from autoptd.passes.ops.costs import collective_seconds, conversion_price, odd_layer_price
from autoptd.passes.solve.eliminate import Factor
from autoptd.passes.solve.strategies import Splitter, Strategy

PARAMETER_USES = {("I", "P"), ("I", "R"), ("I", "S"), ("R", "S")}
# A variable that decides the types of a value, and its choices.
TypeVariable = tuple[int, list[Layout]]
# The price of one conversion, with the signature of costs.conversion_seconds.
Price = Callable[[ValueType, ValueType, float, int, Machine], float]


def wanted(
    node: Node, readers: list[Node], strategies: dict[Node, list[Strategy]], splitter: Splitter
) -> list[Layout]:
    """Return the types in which the readers of `node` may want it: all choices of one reader, then those of the next."""
    types: list[Layout] = []
    for reader in readers:
        types += _needs(node, reader, strategies, splitter)
    return types


def _needs(
    node: Node, reader: Node, strategies: dict[Node, list[Strategy]], splitter: Splitter
) -> list[Layout]:
    """Return the types of `node` that `reader` wants, one for each of its strategies."""
    if reader.op == "output":
        return [splitter.loss]
    return [strategy.needs[node] for strategy in strategies[reader]]


def entry_factors(
    node: Node,
    others: list[Node],
    strategies: dict[Node, list[Strategy]],
    variable: dict[Node, int],
    entry: TypeVariable,
    splitter: Splitter,
) -> list[Factor]:
    """Price the way of `node` into repeated layers: to the type in which the first one reads it, its entry.

    A first layer that differs from the others costs extra: its entry is not the type in which they read `others` instead of
    `node`, or is hard to read (`Splitter.is_plain`).
    """
    i, kinds = entry
    gives = [strategy.gives for strategy in strategies[node]]
    conversions = _table(partial(edge_price, splitter, node), gives, kinds)
    factors: list[Factor] = [((variable[node], i), conversions)]
    # Without it the cheapest first layer would often be unlike all others, for nanoseconds.
    extra = odd_layer_price(splitter.nbytes(node), splitter.degree, splitter.machine)

    def price_of_difference(entered: Layout, read: Layout) -> float:
        is_odd = entered != read or not splitter.is_plain(node, entered)
        return extra * is_odd

    for other in others:
        read = [strategy.gives for strategy in strategies[other]]
        factors.append(((i, variable[other]), _table(price_of_difference, kinds, read)))
    return factors


def edge_factors(
    node: Node,
    readers: list[Node],
    strategies: dict[Node, list[Strategy]],
    variable: dict[Node, int],
    source: TypeVariable,
    shared: TypeVariable | None,
    splitter: Splitter,
) -> list[Factor]:
    """Price the way of `node` from a type of `source` to each reader, and what is kept of it for backward.

    A reader takes it directly or, where that is cheaper, from the type that is materialised once for all (`shared`).
    """
    cost = partial(edge_price, splitter, node)
    i, gives = source
    # q, k and v save the same input once: a third of it is counted on each of their edges.
    savers = [reader for reader in readers if is_saved(node, reader)]
    factors: list[Factor] = []
    if shared is not None:
        factors.append(((i, shared[0]), _table(cost, gives, shared[1])))
    for reader in readers:
        needs = _needs(node, reader, strategies, splitter)
        saved = partial(_saved_price, splitter, node, reader, savers)
        names: tuple[int, ...] = (i,)
        if shared is None:
            table = _direct_table(cost, saved, gives, needs)
        else:
            table = _shared_table(cost, saved, gives, shared[1], needs)
            names = (i, shared[0])
        # The output has no variable: it wants one type, and its dim of the table goes.
        if reader in variable:
            factors.append(((*names, variable[reader]), table))
        else:
            factors.append((names, table[..., 0]))
    return factors


Cost = Callable[[Layout, Layout], float]


def _table(cost: Cost, sources: list[Layout], targets: list[Layout]) -> np.ndarray:
    """Return the costs [source, target] in picoseconds."""
    rows = []
    for source in sources:
        rows.append([cost(source, target) for target in targets])
    return price_table(rows)


def _direct_table(cost: Cost, saved: Cost, sources: list[Layout], needs: list[Layout]) -> np.ndarray:
    return _table(lambda source, need: cost(source, need) + saved(source, need), sources, needs)


def _shared_table(
    cost: Cost, saved: Cost, sources: list[Layout], shared: list[Layout], needs: list[Layout]
) -> np.ndarray:
    """Return the costs [source, shared type, need]: from the source or from the shared type, whichever is cheaper."""
    cube = []
    for source in sources:
        plane = []
        for other in shared:
            plane.append([min(cost(source, need), cost(other, need)) + saved(source, need) for need in needs])
        cube.append(plane)
    return price_table(cube)


def is_saved(node: Node, reader: Node) -> bool:
    """Tell whether `reader` saves the value of `node`, an activation, for its backward."""
    is_activation = note(node).of_params and note(node).kind != "param"
    saves = operator_of(reader).keeps in ("operands", "probabilities")
    return is_activation and saves and note(reader).needs_grad


def gathers_again(splitter: Splitter, reader: Node, source: Layout, target: Layout) -> bool:
    """Tell whether backward of `reader` all-gathers its operand again, so that only the shards are saved."""
    # S -> R alone: so `hook_gemms.gather_again` decides when it marks the gather.
    is_gather = bool(source.shards) and not source.sub_axes and target == splitter.over(R)
    return is_gather and op_name(reader) in ("aten.linear", "aten.addmm")


def _saved_price(
    splitter: Splitter, node: Node, reader: Node, savers: list[Node], source: Layout, target: Layout
) -> float:
    """Return the seconds that saving the value of `node` for backward of `reader` is worth; the savers share one copy."""
    if reader not in savers:
        return 0.0
    machine, t, nbytes = splitter.machine, splitter.degree, splitter.nbytes(node)
    if gathers_again(splitter, reader, source, target):
        seconds = nbytes / t * machine.per_saved_byte
        seconds += collective_seconds("all-gather", nbytes, t, machine)
    else:
        pieces = target.pieces(splitter.mesh)
        seconds = nbytes / pieces * machine.per_saved_byte
        if pieces == 1:
            seconds += nbytes * splitter.per_whole_byte
    return seconds / len(savers)


def price_table(seconds: list[Any]) -> np.ndarray:
    """Round seconds to whole picoseconds: sums of them are exact in float64, and equal layers cost exactly the same."""
    return np.round(1e12 * np.array(seconds))


def edge_price(
    splitter: Splitter, node: Node, source: Layout, target: Layout, count: Price = conversion_price
) -> float:
    """Return the seconds that the solver pays for converting the value of `node`; infinite where that cannot be done.

    `count` gives the price of one step: with `costs.conversion_seconds`, how long the conversion takes.
    """
    if source == target:
        return 0.0
    path = splitter.path(source, target)
    if path is None or not _is_possible(splitter, node, path):
        return math.inf
    seconds = 0.0
    for step in path:
        nbytes, degree = splitter.nbytes(node) / step.others, splitter.mesh.degree(step.axis)
        seconds += count(step.before, step.after, nbytes, degree, splitter.machine)
    return seconds


def _is_possible(splitter: Splitter, node: Node, path: list[Step]) -> bool:
    # The pieces of a split are converted one by one, behind their getitem.
    if isinstance(value(node), (tuple, list)) or not splitter.may_convert(node, path):
        return False
    for step in path:
        kinds, degree = (step.before, step.after), splitter.mesh.degree(step.axis)
        is_exchange = all(kind.kind == "S" for kind in kinds)
        # There is no all-to-all of padded shards.
        if is_exchange and any(padded_size(note(node).dims, kind, degree) for kind in kinds):
            return False
        if note(node).kind == "param" and (step.before.kind, step.after.kind) not in PARAMETER_USES:
            return False
    return True
