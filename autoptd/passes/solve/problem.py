"""The problem that the solver minimizes: variables, their choices, and the tables of costs between them.

In: the operators and parameters of a graph, their strategies, prices, and which nodes are tied (`ties.py`). Out: a `Problem`
with its answer, and the types of shared conversions and entries:

- One variable per operator or parameter, whose choices are its strategies; tied nodes share one. One table per edge: the
  conversions from each choice of a value to each choice of its reader.
- A *shared conversion* is a variable of a value with several readers: a type to which it is converted once for all of them,
  so that q, k and v share a gather.
- An *entry* is a variable of a value that repeated layers begin with: it is converted to one type before the first layer. If
  that is not the type which the other layers read, a price is paid: on near ties the first layer is like all others.

    solved = solve_tied(nodes, strategies, prices, ties)
    solved.problem.alternatives(c_fc)[1].seconds        # 6.1e-05: the extra seconds of the second best
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
from torch.fx import Node

from autoptd.ir.layout import Layout
from autoptd.ir.notes import note
from autoptd.ir.operators.table import operator_of
from autoptd.passes.solve.minimize import Factor, TableTooLarge, entry_of, minimize, minimize_nearly, price
from autoptd.passes.solve.ties import Strategies, Strategy, Ties

# A variable that decides the types of a value, and its choices.
TypeVariable = tuple[int, list[Layout]]
# Strategies that are prescribed for some operators.
Asked = Mapping[Node, Strategy] | None


class Prices(Protocol):
    """The seconds that a solver pays, for lists of types at once; infinite for impossible conversions."""

    @property
    def loss(self) -> Layout:
        """The type of the loss."""

    def conversions(self, node: Node, sources: list[Layout], targets: list[Layout]) -> np.ndarray:
        """Return the price of every conversion of a value: an array [source, target]."""

    def saved(
        self, node: Node, reader: Node, savers: list[Node], sources: list[Layout], targets: list[Layout]
    ) -> np.ndarray:
        """Return the price of saving a value for backward of `reader`, [source, target]; `savers` share one copy."""

    def odd_layers(self, node: Node, entered: list[Layout], read: list[Layout]) -> np.ndarray:
        """Return the price of a first layer whose input type differs from that of the others, [entered, read]."""


def price_table(seconds: np.ndarray | list[float]) -> np.ndarray:
    """Round seconds to whole picoseconds: their sums are exact in float64, and equal layers cost exactly the same."""
    return np.round(1e12 * np.asarray(seconds))


@dataclass(frozen=True)
class Alternative:
    """A strategy of a node, and the extra cost of the best plan with it, in seconds per microbatch."""

    strategy: Strategy
    seconds: float
    is_chosen: bool


@dataclass(frozen=True)
class Problem:
    """A solved problem: the `variable` of every node (tied nodes share one), its strategies, and the tables.

    `searched` is the number of variables that a search decided. Unless it is 0, the price may not be minimal.
    """

    variable: dict[Node, int]
    strategies: Strategies
    choices: list[int]
    factors: list[Factor]
    answer: list[int]
    searched: int = 0

    @property
    def is_possible(self) -> bool:
        """Whether the answer can be run."""
        return math.isfinite(price(self.answer, self.factors))

    @property
    def impossible(self) -> set[Node]:
        """The nodes at both ends of the conversions that the answer needs and that do not exist."""
        variables: set[int] = set()
        for factor in self.factors:
            if math.isinf(entry_of(factor, self.answer)):
                variables.update(factor[0])
        return {node for node, i in self.variable.items() if i in variables}

    def alternatives(self, node: Node) -> list[Alternative]:
        """Return all strategies of `node`, the chosen one first, then by price; for tied layers, those of the first.

        The price is infinite if no plan has the strategy, and nan if none was found. Every alternative solves the model
        again.
        """
        variable = self.variable[node]
        chosen = self.answer[variable]
        ordered = []
        for i, strategy in enumerate(self.strategies.alike(node)):
            extra = 0.0 if i == chosen else self._extra_seconds(variable, i)
            ordered.append(Alternative(strategy, extra, i == chosen))
        ordered.sort(key=lambda other: (not other.is_chosen, math.isnan(other.seconds), other.seconds))
        return ordered

    def cheapest_with(self, node: Node, accepts: Callable[[Strategy], bool]) -> float:
        """Return the least extra seconds of an accepted strategy of `node`; infinite without one, nan if not found."""
        variable, least = self.variable[node], math.inf
        for i, strategy in enumerate(self.strategies[node]):
            if i == self.answer[variable] or not accepts(strategy):
                continue
            extra = self._extra_seconds(variable, i)
            if math.isnan(extra):
                return extra
            least = min(least, extra)
        return least

    def _extra_seconds(self, variable: int, choice: int) -> float:
        """Return the extra seconds per layer of the best plan with a choice."""
        # One more factor forbids all other choices; all other variables are minimized over again.
        only = np.full(self.choices[variable], math.inf)
        only[choice] = 0.0
        try:
            answer = minimize(self.choices, [*self.factors, ((variable,), only)])
        except TableTooLarge:
            return math.nan
        if answer[variable] != choice:
            return math.inf
        picoseconds = price(answer, self.factors) - price(self.answer, self.factors)
        # The number of nodes that share the variable: one in each of the tied layers.
        layers = Counter(self.variable.values())[variable]
        return picoseconds * 1e-12 / layers


class Solved(NamedTuple):
    """A problem with its answer, the types of shared conversions and entries, and what the second layer reads there."""

    problem: Problem
    shared_conversions: dict[Node, Layout]
    entries: dict[Node, Layout]
    enters: dict[Node, Node]


class Variables:
    """The variables and tables of a problem, gathered node by node.

    The variables of the nodes come first; those of shared conversions, of entries and of the readers of a parameter in
    `apart` follow in the order in which they are added. Ties are broken by this order.
    """

    def __init__(
        self, solved: list[Node], strategies: dict[Node, list[Strategy]], prices: Prices, ties: Ties
    ) -> None:
        self.strategies, self.prices, self.ties = strategies, prices, ties
        # Tied nodes are decided with that of the first layer.
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

    def add(self, node: Node, *, may_share: bool) -> None:
        """Add the tables between `node` and its readers; with `may_share`, several readers may share a conversion."""
        readers = self._readers(node)
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

    def add_apart(self, node: Node) -> list[int]:
        """Let every reader of a parameter choose separately; return the variables of these choices."""
        readers, added = self._readers(node), []
        # Each copy of the parameter pays its part of the price of storing it.
        for reader in readers:
            own = len(self.choices)
            added.append(own)
            seconds = [strategy.seconds / len(readers) for strategy in self.strategies[node]]
            self.choices.append(len(seconds))
            self.factors.append(((own,), price_table(seconds)))
            self.factors += self._edges(node, [reader], (own, self._gives(node)), None)
        return added

    def all_factors(self) -> list[Factor]:
        """Return all tables; those of equal edges once, times their number."""
        factors = list(self.factors)
        for key, (tables, _) in self.tables.items():
            factors += [(names, table * self.times[key]) for names, table in tables]
        return [_without_repeats(factor) for factor in factors]

    def _make_tables(
        self, node: Node, readers: list[Node], others: list[Node], is_shared: bool
    ) -> tuple[list[Factor], TypeVariable | None]:
        own = self.variable[node]
        seconds = [strategy.seconds for strategy in self.strategies[node]]
        tables: list[Factor] = [((own,), price_table(seconds))]
        source: TypeVariable = own, self._gives(node)
        # Before repeated layers, the value is converted to the entry's type, and the layers read that.
        if others:
            kinds = list(source[1])
            for other in others:
                kinds += self._gives(other)
            self.entries[node] = entry = self._add_variable(kinds)
            tables += self._entry(node, others, entry)
            source = entry
        shared: TypeVariable | None = None
        if is_shared:
            kinds = list(source[1])
            for reader in readers:
                kinds += self._needs(node, reader)
            shared = self._add_variable(kinds)
        tables += self._edges(node, readers, source, shared)
        return tables, shared

    def _entry(self, node: Node, others: list[Node], entry: TypeVariable) -> list[Factor]:
        """Price the conversion of `node` to its entry.

        A first layer that differs from the others, which read one of `others` instead of `node`, costs extra.
        """
        i, kinds = entry
        table = self.prices.conversions(node, self._gives(node), kinds)
        factors: list[Factor] = [((self.variable[node], i), price_table(table))]
        for other in others:
            odd = self.prices.odd_layers(node, kinds, self._gives(other))
            factors.append(((i, self.variable[other]), price_table(odd)))
        return factors

    def _edges(
        self, node: Node, readers: list[Node], source: TypeVariable, shared: TypeVariable | None
    ) -> list[Factor]:
        """Price the conversions of `node` from a type of `source` to each reader, and the values saved for backward.

        A reader converts it directly or, if that is cheaper, from the type of the `shared` conversion.
        """
        prices, (i, gives) = self.prices, source
        # q, k and v save the same input once: a third of it is counted on each of their edges.
        savers = [reader for reader in readers if _is_saved(node, reader)]
        factors: list[Factor] = []
        if shared is not None:
            factors.append(((i, shared[0]), price_table(prices.conversions(node, gives, shared[1]))))
        for reader in readers:
            needs = self._needs(node, reader)
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
            # The output has no variable: it needs one type, and its dim of the table is dropped.
            if reader in self.variable:
                factors.append(((*names, self.variable[reader]), table))
            else:
                factors.append((names, table[..., 0]))
        return factors

    def _readers(self, node: Node) -> list[Node]:
        return [user for user in node.users if user in self.variable or user.op == "output"]

    def _gives(self, node: Node) -> list[Layout]:
        return [strategy.gives for strategy in self.strategies[node]]

    def _needs(self, node: Node, reader: Node) -> list[Layout]:
        """Return the types of `node` that `reader` needs, one for each of its strategies."""
        if reader.op == "output":
            return [self.prices.loss]
        return [strategy.needs[node] for strategy in self.strategies[reader]]

    def _add_variable(self, kinds: list[Layout]) -> TypeVariable:
        different = list(dict.fromkeys(kinds))
        self.choices.append(len(different))
        return len(self.choices) - 1, different


def _is_saved(node: Node, reader: Node) -> bool:
    """Tell whether `reader` saves the value of `node`, an activation, for its backward."""
    is_activation = note(node).of_params and note(node).kind != "param"
    saves = operator_of(reader).keeps in ("operands", "probabilities")
    return is_activation and saves and note(reader).needs_grad


def _without_repeats(factor: Factor) -> Factor:
    """Take the diagonal of a table that names a variable twice: one between a value and its tied value in the next layer."""
    names, table = factor
    different = tuple(dict.fromkeys(names))
    if len(different) == len(names):
        return factor
    dims = [different.index(name) for name in names]
    return different, np.einsum(table, dims, list(range(len(different))))


def solve_tied(
    solved: list[Node],
    strategies: Strategies,
    prices: Prices,
    ties: Ties,
    *,
    apart: Collection[Node] = (),
    votes: dict[Node, Counter[int]] | None = None,
    without_sharing: Collection[Node] = (),
    exact: bool = True,
    asked: Asked = None,
) -> Solved:
    """Return the problem with its answer of least cost, and the types of shared conversions and entries.

    Tied nodes share a variable. A parameter in `apart` is chosen separately for every reader; how often each of its
    strategies was chosen is added to `votes`. Operators in `asked` get the strategies prescribed there.
    """
    variables = Variables(solved, strategies, prices, ties)
    copies: list[tuple[Node, int]] = []
    for node in solved:
        if node in apart:
            copies += [(node, i) for i in variables.add_apart(node)]
        else:
            variables.add(node, may_share=node not in without_sharing)
    choices, factors = variables.choices, variables.all_factors()
    known = [*factors, *_only(variables, asked or {})]
    answer, searched = (minimize(choices, known), 0) if exact else minimize_nearly(choices, known)
    for node, i in copies:
        assert votes is not None
        votes[node][answer[i]] += 1

    def types(chosen: dict[Node, TypeVariable]) -> dict[Node, Layout]:
        return {node: kinds[answer[i]] for node, (i, kinds) in chosen.items()}

    problem = Problem(variables.variable, strategies, choices, factors, answer, searched)
    enters = {node: ties.enters[node][0] for node in variables.entries}
    return Solved(problem, types(variables.shared), types(variables.entries), enters)


def _only(variables: Variables, asked: Mapping[Node, Strategy]) -> Iterator[Factor]:
    """Yield tables that forbid all but the prescribed strategies."""
    taken: set[int] = set()
    for node, strategy in asked.items():
        variable = variables.variable.get(node)
        if variable is None or variable in taken:
            continue
        taken.add(variable)
        other = [not _is_like(each, strategy) for each in variables.strategies[node]]
        yield (variable,), np.where(other, math.inf, 0.0)


def follows(chosen: Mapping[Node, Strategy], asked: Mapping[Node, Strategy]) -> bool:
    """Tell whether a plan has the prescribed strategies."""
    return all(_is_like(chosen[node], strategy) for node, strategy in asked.items() if node in chosen)


def _is_like(strategy: Strategy, asked: Strategy) -> bool:
    """Tell whether a strategy is the prescribed one, regardless of conversions of operands and of the order of shards."""
    if strategy.form != asked.form or _unordered(strategy.gives) != _unordered(asked.gives):
        return False
    pairs = zip(strategy.needs.values(), asked.needs.values(), strict=True)
    return all(_unordered(first) == _unordered(second) for first, second in pairs)


def _unordered(layout: Layout) -> Layout:
    """Return a layout without the order of its shards."""
    return Layout({axis: replace(kind, order="") for axis, kind in layout.types})


__all__ = [
    "Alternative",
    "Asked",
    "Prices",
    "Problem",
    "Solved",
    "TypeVariable",
    "Variables",
    "follows",
    "price_table",
    "solve_tied",
]
