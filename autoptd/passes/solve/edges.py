"""What it costs to bring a value to those that read it: the tables between the solver's variables.

In: a value, its readers, their strategies, and prices. Out: `Factor`s (`eliminate.py`) over the variables of the value, of its
readers, and of its shared conversion or entry (`assign.py`). Costs are whole picoseconds, infinite where there is no such
conversion.
"""

from __future__ import annotations

import numpy as np
from torch.fx import Node

from autoptd.ir.layout import Layout
from autoptd.passes.solve.eliminate import Factor
from autoptd.passes.solve.prices import Prices, is_saved, price_table
from autoptd.passes.solve.strategy import Strategy

# A variable that decides the types of a value, and its choices.
TypeVariable = tuple[int, list[Layout]]
Strategies = dict[Node, list[Strategy]]


def wanted(node: Node, readers: list[Node], strategies: Strategies, prices: Prices) -> list[Layout]:
    """Return the types in which the readers of `node` may want it: all choices of one reader, then those of the next."""
    types: list[Layout] = []
    for reader in readers:
        types += _needs(node, reader, strategies, prices)
    return types


def _needs(node: Node, reader: Node, strategies: Strategies, prices: Prices) -> list[Layout]:
    """Return the types of `node` that `reader` wants, one for each of its strategies."""
    if reader.op == "output":
        return [prices.loss]
    return [strategy.needs[node] for strategy in strategies[reader]]


def entry_factors(
    node: Node,
    others: list[Node],
    strategies: Strategies,
    variable: dict[Node, int],
    entry: TypeVariable,
    prices: Prices,
) -> list[Factor]:
    """Price the way of `node` into repeated layers: to the type in which the first one reads it, its entry.

    A first layer that differs from the others costs extra: its entry is not the type in which they read `others` instead of
    `node`, or is hard to read.
    """
    i, kinds = entry
    gives = [strategy.gives for strategy in strategies[node]]
    factors: list[Factor] = [((variable[node], i), price_table(prices.conversions(node, gives, kinds)))]
    for other in others:
        read = [strategy.gives for strategy in strategies[other]]
        factors.append(((i, variable[other]), price_table(prices.odd_layers(node, kinds, read))))
    return factors


def edge_factors(
    node: Node,
    readers: list[Node],
    strategies: Strategies,
    variable: dict[Node, int],
    source: TypeVariable,
    shared: TypeVariable | None,
    prices: Prices,
) -> list[Factor]:
    """Price the way of `node` from a type of `source` to each reader, and what is kept of it for backward.

    A reader takes it directly or, where that is cheaper, from the type that is materialised once for all (`shared`).
    """
    i, gives = source
    # q, k and v save the same input once: a third of it is counted on each of their edges.
    savers = [reader for reader in readers if is_saved(node, reader)]
    factors: list[Factor] = []
    if shared is not None:
        factors.append(((i, shared[0]), price_table(prices.conversions(node, gives, shared[1]))))
    for reader in readers:
        needs = _needs(node, reader, strategies, prices)
        table = prices.conversions(node, gives, needs)
        saved = prices.saved(node, reader, savers, gives, needs)
        names: tuple[int, ...] = (i,)
        if shared is not None:
            # [source, shared type, need]: from the source or from the shared type, whichever is cheaper.
            onward = prices.conversions(node, shared[1], needs)
            table = np.minimum(table[:, None], onward)
            saved = saved[:, None]
            names = (i, shared[0])
        table = price_table(table + saved)
        # The output has no variable: it wants one type, and its dim of the table goes.
        if reader in variable:
            factors.append(((*names, variable[reader]), table))
        else:
            factors.append((names, table[..., 0]))
    return factors
