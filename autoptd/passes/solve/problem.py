"""The problem that the solver minimises: variables, their choices, and the tables of costs between them.

In: the operators and parameters of a graph, their strategies, and which of them are tied (`ties.py`). Out: a `Problem`, once
`assign.py` has minimised the tables that `Variables` gathered.

    variables = Variables(solved, strategies, prices, ties)
    for node in solved:
        variables.add(node, may_share=True)
    minimize(variables.choices, variables.all_factors())
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np
from torch.fx import Node

from autoptd.ir.layout import Layout
from autoptd.passes.solve.edges import TypeVariable, edge_factors, entry_factors, wanted
from autoptd.passes.solve.eliminate import Factor, entry_of, price
from autoptd.passes.solve.prices import Prices, price_table
from autoptd.passes.solve.strategy import Strategy
from autoptd.passes.solve.tied import Strategies
from autoptd.passes.solve.ties import Ties


@dataclass(frozen=True)
class Problem:
    """What was minimised: `variable` of every node (tied nodes share one), its strategies, and the tables between variables."""

    variable: dict[Node, int]
    strategies: Strategies
    choices: list[int]
    factors: list[Factor]
    answer: list[int]
    # Number of variables that a search decided: unless it is 0, the price need not be the least.
    searched: int = 0

    def price(self, answer: list[int]) -> float:
        """Return the picoseconds of an answer, memory priced in."""
        return price(answer, self.factors)

    @property
    def is_possible(self) -> bool:
        """Whether the answer can be run."""
        return math.isfinite(self.price(self.answer))

    @property
    def impossible(self) -> set[Node]:
        """The nodes at either end of a conversion that the answer needs and that does not exist."""
        variables: set[int] = set()
        for factor in self.factors:
            if math.isinf(entry_of(factor, self.answer)):
                variables.update(factor[0])
        return {node for node, i in self.variable.items() if i in variables}


class Variables:
    """The variables and tables of the problem, gathered node by node.

    The variables of the nodes come first; those of shared conversions, of entries and of the readers of a parameter in
    `apart` are appended as they are met. That order breaks ties, so it is fixed.
    """

    def __init__(
        self, solved: list[Node], strategies: dict[Node, list[Strategy]], prices: Prices, ties: Ties
    ) -> None:
        self.strategies, self.prices, self.ties = strategies, prices, ties
        # Tied nodes are decided with the one of the first layer.
        self.heads = [node for node in solved if ties.same.get(node, node) is node]
        self.variable = {node: i for i, node in enumerate(self.heads)}
        self.variable |= {
            node: self.variable[ties.same[node]] for node in solved if node not in self.variable
        }
        self.choices = [len(strategies[node]) for node in self.heads]
        self.factors: list[Factor] = []
        self.shared: dict[Node, TypeVariable] = {}
        self.entries: dict[Node, TypeVariable] = {}
        # Equal tables between the same variables are kept once, and multiplied at the end.
        self.tables: dict[Hashable, tuple[list[Factor], TypeVariable | None]] = {}
        self.times: Counter[Hashable] = Counter()

    def readers(self, node: Node) -> list[Node]:
        return [user for user in node.users if user in self.variable or user.op == "output"]

    def gives(self, node: Node) -> list[Layout]:
        return [strategy.gives for strategy in self.strategies[node]]

    def add(self, node: Node, *, may_share: bool) -> None:
        """Add the tables between `node` and its readers; `may_share`: with one type that is materialised for several."""
        readers = self.readers(node)
        others = [other for other in self.ties.enters.get(node, ()) if other in self.variable]
        reader_variables = sorted(self.variable.get(reader, -1) for reader in readers)
        # Tied layers have the same variables: their tables are made once, and counted.
        key = (self.variable[node], tuple(reader_variables), bool(others))
        if key not in self.tables:
            self.tables[key] = self._make_tables(node, readers, others, may_share and len(readers) > 1)
        self.times[key] += 1
        shared = self.tables[key][1]
        if shared is not None:
            self.shared[node] = shared

    def _make_tables(
        self, node: Node, readers: list[Node], others: list[Node], is_shared: bool
    ) -> tuple[list[Factor], TypeVariable | None]:
        own = self.variable[node]
        seconds = [strategy.seconds for strategy in self.strategies[node]]
        tables: list[Factor] = [((own,), price_table(seconds))]
        source: TypeVariable = own, self.gives(node)
        # In front of repeated layers: the value is brought to the entry's type, and the layers read that.
        if others:
            kinds = list(source[1])
            for other in others:
                kinds += self.gives(other)
            entry = self._add_variable(kinds)
            self.entries[node] = entry
            tables += entry_factors(node, others, self.strategies, self.variable, entry, self.prices)
            source = entry
        shared: TypeVariable | None = None
        if is_shared:
            shared = self._add_variable(source[1] + wanted(node, readers, self.strategies, self.prices))
        tables += edge_factors(node, readers, self.strategies, self.variable, source, shared, self.prices)
        return tables, shared

    def add_apart(self, node: Node) -> list[int]:
        """Let every reader of a parameter choose for itself; return the variables of these choices."""
        readers, added = self.readers(node), []
        # Each copy of the parameter pays its part of the price of storing it.
        for reader in readers:
            own = len(self.choices)
            added.append(own)
            seconds = [strategy.seconds / len(readers) for strategy in self.strategies[node]]
            self.choices.append(len(seconds))
            self.factors.append(((own,), price_table(seconds)))
            # The reader's tables are about this copy of the parameter alone.
            source = own, self.gives(node)
            variable = self.variable | {node: own}
            self.factors += edge_factors(node, [reader], self.strategies, variable, source, None, self.prices)
        return added

    def _add_variable(self, kinds: list[Layout]) -> TypeVariable:
        different = list(dict.fromkeys(kinds))
        self.choices.append(len(different))
        return len(self.choices) - 1, different

    def all_factors(self) -> list[Factor]:
        """Return every table, those of equal edges once, times their number."""
        factors = list(self.factors)
        for key, (tables, _) in self.tables.items():
            factors += [(names, table * self.times[key]) for names, table in tables]
        return [_without_repeats(factor) for factor in factors]


def _without_repeats(factor: Factor) -> Factor:
    """Take the diagonal of a table that names a variable twice.

    Such is one between a value and its counterpart in the next layer, which are tied.
    """
    names, table = factor
    different = tuple(dict.fromkeys(names))
    if len(different) == len(names):
        return factor
    dims = [different.index(name) for name in names]
    return different, np.einsum(table, dims, list(range(len(different))))
