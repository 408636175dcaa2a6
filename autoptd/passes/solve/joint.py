"""Find the types over tp and over cp together: one strategy over each for every operator, at the least price of all pairs.

In: a graph without types, the `Splitter` of weights over tp, and that of tokens over cp. Out: a `Joint`: the problem over tp
that is left once the types over cp are fixed, with its answer; the strategies over cp; and the cost of both. The conversions
over cp, and their places among those over tp, are determined later (`split_tokens.py`).

- A pair of strategies is valid if every atom that both axes cut divides over the product of their ranks. Of tokens, cp cuts the
  outer part; of all other dims, tp.
- A value is converted over one axis after the other, in the cheaper order: each conversion moves the part that the other axis
  leaves at that moment. The outer part of an atom is not converted while the other axis has the inner one.

    joint = solve_pairs(graph, weights, "cp", batched, attention="auto")
    write_solved(joint.of_weights, weights)
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterator
from contextlib import suppress
from functools import cache
from itertools import product

import numpy as np
from torch.fx import Graph, Node

from autoptd.ir.layout import Layout
from autoptd.ir.notes import note, payload, value
from autoptd.ir.operators.record import QUERIES, argument, operands
from autoptd.ir.types import I, R, Segmented
from autoptd.passes.ops.costs import compute_seconds, conversion_seconds, flops
from autoptd.passes.solve.assignment import Joint
from autoptd.passes.solve.minimize import Answer, Factor, Pair, TableTooLarge, minimize_pairs, narrowed
from autoptd.passes.solve.prices import AxisPrices, places
from autoptd.passes.solve.problem import Problem, Solved, TypeVariable, Variables, solve_tied
from autoptd.passes.solve.splits import Splitter, work_parts
from autoptd.passes.solve.strategies import MICROBATCHES_PER_STEP, strategies_of
from autoptd.passes.solve.ties import Strategy, find_ties
from autoptd.passes.solve.tokens import TokenSplitter

# The two parts of a choice: over tp, and over cp.
FIRST, SECOND = 0, 1


def solve_pairs(
    graph: Graph, weights: Splitter, axis: str, batched: Collection[str], attention: str
) -> Joint | None:
    """Solve over the axis of `weights` and the `axis` of tokens, which splits `attention` as requested.

    Returns None if the tables are too large to solve even one axis with the other one fixed.
    """
    tokens = TokenSplitter(
        graph, weights.axes, axis, weights.mesh, weights.machine, batched, attention=attention
    )
    with suppress(TableTooLarge):
        return _solve(graph, weights, tokens)
    return None


def _solve(graph: Graph, weights: Splitter, tokens: TokenSplitter) -> Joint:
    solved = [node for node in graph.nodes if weights.decides(node) and node.op != "output"]
    ways = {node: weights.ways(node) + tokens.ways(node) for node in solved if node.op == "call_function"}
    ties = find_ties(graph, ways, weights.facts)
    pairs = Pairs(weights, tokens, ties.same)
    variables = Variables(solved, pairs, PairPrices(pairs), ties)
    for node in solved:
        variables.add(node, may_share=True)
    # The node that each variable decides.
    heads = dict(enumerate(variables.heads))
    parts = {variable: np.array(pairs.parts[node]) for variable, node in heads.items()}
    alone = []
    for strategies, splitter in zip(pairs.over, (weights, tokens), strict=True):
        problem = solve_tied(solved, strategies, AxisPrices(splitter), ties).problem
        alone.append({variable: problem.answer[variable] for variable in heads})
    factors = [*variables.all_factors(), *_asked(tokens, heads, parts, alone[FIRST])]
    pair = Pair(variables.choices, factors, parts, _order(variables))
    answer = minimize_pairs(pair, alone, (weights.axis, tokens.axis))
    of_tokens = {}
    for node in solved:
        variable = variables.variable[node]
        of_tokens[node] = pairs.over[SECOND].of(node, parts[variable][answer.choices[variable], SECOND])
    return Joint(answer, _of_weights(pair, answer, variables, pairs), of_tokens)


def _asked(
    tokens: TokenSplitter, heads: dict[int, Node], parts: dict[int, np.ndarray], alone: dict[int, int]
) -> Iterator[Factor]:
    """Yield tables that keep attention split over tp as it would be without cp, if the user decides how cp splits it.

    A request that does not fit is then refused; the split over tp does not change for it.
    """
    if tokens.context == "auto":
        return
    for variable, node in heads.items():
        if tokens.multiplies_activations(node) and tokens.reads_tokens(node):
            yield (variable,), np.where(parts[variable][:, FIRST] == alone[variable], 0.0, math.inf)


def _order(variables: Variables) -> list[int]:
    """Return all variables in the order of the model: a value, its entry, its shared conversion."""
    place = {i: float(i) for i in range(len(variables.choices))}
    for offset, chosen in ((0.25, variables.entries), (0.5, variables.shared)):
        for node, (i, _) in chosen.items():
            place[i] = variables.variable[node] + offset
    return sorted(place, key=place.__getitem__)


def _of_weights(pair: Pair, answer: Answer, variables: Variables, pairs: Pairs) -> Solved:
    """Return the problem over tp with the types over cp fixed, with its answer."""
    left = pair.with_part(SECOND, pair.part_of(SECOND, answer.choices))
    assert left is not None
    ties, strategies = variables.ties, strategies_of(pairs.weights, variables.ties.same)
    for variable, node in enumerate(variables.heads):
        own = pairs.over[FIRST][node]
        strategies[node] = [own[part] for part in pair.parts[variable][left[variable], FIRST]]
    places = [int(np.flatnonzero(each == i)[0]) for each, i in zip(left, answer.choices, strict=True)]
    choices = [len(each) for each in left]
    problem = Problem(variables.variable, strategies, choices, list(narrowed(pair.factors, left)), places)

    def types(chosen: dict[Node, TypeVariable]) -> dict[Node, Layout]:
        return {
            node: kinds[answer.choices[i]].over(pairs.weights.axis) for node, (i, kinds) in chosen.items()
        }

    enters = {node: ties.enters[node][0] for node in variables.entries}
    return Solved(problem, types(variables.shared), types(variables.entries), enters)


class Pairs(dict[Node, list[Strategy]]):
    """The valid pairs of strategies of every node, made on first use, as strategies with types over both axes.

    `parts[node][k]` are the indices of pair k in `over[0][node]` and `over[1][node]`.
    """

    def __init__(self, weights: Splitter, tokens: TokenSplitter, same: dict[Node, Node]) -> None:
        super().__init__()
        self.weights, self.tokens, self.mesh = weights, tokens, weights.mesh
        self.over = strategies_of(weights, same), strategies_of(tokens, same)
        self.parts: dict[Node, list[tuple[int, int]]] = {}
        self.merged = cache(_merged)

    def __missing__(self, node: Node) -> list[Strategy]:
        self[node], self.parts[node] = [], []
        read = list(dict.fromkeys(operands(node))) if node.op == "call_function" else []
        # The first axis varies slowest: strategies that are whole over tp come first, as in its own list.
        for i, first in enumerate(self.over[0][node]):
            for j, second in enumerate(self.over[1][node]):
                values = [(node, first.gives, second.gives)]
                values += [(operand, first.needs[operand], second.needs[operand]) for operand in read]
                # Positions of causal queries are counted along one axis.
                is_twice = first.form == second.form == QUERIES and argument(node, "is_causal")
                if not is_twice and all(self.divides(*each) for each in values):
                    self[node].append(self._pair(node, first, second))
                    self.parts[node].append((i, j))
        return self[node]

    def _pair(self, node: Node, first: Strategy, second: Strategy) -> Strategy:
        needs = {operand: self.merged(types, second.needs[operand]) for operand, types in first.needs.items()}
        gives = self.merged(first.gives, second.gives)
        return Strategy(needs, gives, self._seconds(node, first, second), f"{first.why}; {second.why}")

    def divides(self, node: Node, first: Layout, second: Layout) -> bool:
        """Tell whether the atoms of a value that both axes cut divide into equal parts, one for every rank."""
        for place in common_places(first, second):
            cutting = [
                axis for axis, kind in (*first.shards, *second.shards) if (kind.dim, kind.atom) == place
            ]
            ranks = math.prod(map(self.mesh.degree, cutting))
            size = note(node).dims[place[0]][place[1]]
            blocks = size.blocks if isinstance(size, Segmented) else (size,)
            if any(block % ranks for block in blocks):
                return False
        return True

    def _seconds(self, node: Node, first: Strategy, second: Strategy) -> float:
        """Return the seconds of an operator that both axes split, or of storing a parameter."""
        if note(node).kind == "param":
            # Ranks along cp store the same part as their tensor rank, and sum its gradient once per step.
            nbytes, machine = payload(node) / first.gives.pieces(self.mesh), self.tokens.machine
            seconds = first.seconds
            for axis, kind in second.gives.types:
                if kind == R:
                    summed = conversion_seconds(I, R, nbytes, self.mesh.degree(axis), machine)
                    seconds += summed / MICROBATCHES_PER_STEP
            return seconds
        whole = compute_seconds(node, self.weights.machine)
        cut = [self._cut(node, strategy) for strategy in (first, second)]
        # The price that each axis adds to its part of the work: for repeated products, and reductions in local forms.
        extra = first.seconds - whole / cut[0] + second.seconds - whole / cut[1]
        return whole / cut[0] / cut[1] + extra

    def _cut(self, node: Node, strategy: Strategy) -> float:
        """Return the number of parts into which a strategy divides a matrix product; 1 for other operators."""
        if not flops(node):
            return 1
        pieces = max(types.pieces(self.mesh) for types in (strategy.gives, *strategy.needs.values()))
        cut = {operand for operand, types in strategy.needs.items() if types.shards}
        return work_parts(node, cut, pieces)


def _merged(first: Layout, second: Layout) -> Layout:
    """Return the layout with the types over both axes."""
    return Layout(dict(first.types) | dict(second.types))


def common_places(first: Layout, second: Layout) -> frozenset[tuple[int, int]]:
    """Return the atoms that both layouts cut, as (dim, atom)."""
    return first.cut_places & second.cut_places


class PairPrices(AxisPrices):
    """The prices of types over both axes."""

    def __init__(self, pairs: Pairs) -> None:
        super().__init__(pairs.weights, pairs.tokens)
        self.pairs = pairs
        # By kind of value: see `_kind`.
        self._tables: dict[tuple[Hashable, tuple[Layout, ...], tuple[Layout, ...]], np.ndarray] = {}
        self._is_free = cache(self._may_move)

    def _kind(self, node: Node) -> Hashable:
        """Return everything about a value that the price of its conversions depends on."""
        axes, is_several = self.pairs.tokens.axes, isinstance(value(node), (tuple, list))
        ids: Hashable = tuple(map(tuple, axes.ids(node))) if axes.has(node) else node
        return ids, note(node).layout, payload(node), note(node).kind, is_several

    def conversions(self, node: Node, sources: list[Layout], targets: list[Layout]) -> np.ndarray:
        key = self._kind(node), tuple(sources), tuple(targets)
        if key not in self._tables:
            self._tables[key] = self._conversions(node, sources, targets)
        return self._tables[key]

    def _conversions(self, node: Node, sources: list[Layout], targets: list[Layout]) -> np.ndarray:
        before, after = self.parts(sources), self.parts(targets)
        orders = []
        for k, other in ((0, 1), (1, 0)):
            # During the first conversion, the other axis has the type of the source; during the second, that of the target.
            first = self._moved(k, node, before[k], after[k], before[other], is_first=True)
            second = self._moved(other, node, before[other], after[other], after[k], is_first=False)
            orders.append(first + second)
        return np.minimum(*orders)

    def _moved(
        self,
        axis: int,
        node: Node,
        sources: list[Layout],
        targets: list[Layout],
        held: list[Layout],
        *,
        is_first: bool,
    ) -> np.ndarray:
        """Return the price of conversions over one axis, [source, target].

        Meanwhile the value has types `held` over the other axis: those of the source if this `is_first`, else of the target.
        """
        different = [list(dict.fromkeys(each)) for each in (sources, targets, held)]
        rows, columns, third = map(np.array, map(places, (sources, targets, held), different))
        price = self._price[axis]
        # The other axis cuts the value, and one of its pieces is converted: there are few different numbers of pieces.
        cut = [types.pieces(self.pairs.mesh) for types in different[2]]
        numbers = sorted(set(cut))
        prices = [price(node, *each, pieces=number) for *each, number in product(*different[:2], numbers)]
        sizes = [len(each) for each in different]
        table = np.reshape(prices, (*sizes[:2], len(numbers)))[:, :, np.searchsorted(numbers, cut)]
        free = [self._free(axis, node, each, different[2]) for each in different[:2]]
        table = np.where(free[0][:, None] & free[1][None], table, math.inf)
        for i, j in product(*map(range, sizes[:2])):
            if different[0][i] == different[1][j]:
                table[i, j] = 0.0
        return table[rows[:, None], columns[None], third[:, None] if is_first else third[None]]

    def _free(self, axis: int, node: Node, layouts: list[Layout], held: list[Layout]) -> np.ndarray:
        """Tell which of `layouts` may be converted, or result from it, while the value has types `held` over the other axis."""
        free = [self._is_free(axis, node, *each) for each in product(layouts, held)]
        return np.reshape(free, (len(layouts), len(held)))

    def _may_move(self, axis: int, node: Node, layout: Layout, other: Layout) -> bool:
        if not self.pairs.divides(node, layout, other):
            return False
        # tp has the inner part of tokens, cp that of all other dims.
        shared = common_places(layout, other)
        return all(axis == (0 if self.pairs.tokens.is_token(node, place) else 1) for place in shared)
