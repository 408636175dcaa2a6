"""Pairs of strategies: how the ranks along two axes share an operator, and what that costs.

In: the `Splitter` of weights over tp, and that of tokens over cp, of one graph before it has types. Out: for every node those
pairs of its strategies that go together, as strategies whose layouts have types over both axes; the prices between them.

- An atom that both cut must divide over the product of their ranks. Of tokens cp has the outer part, of all else tp.
- A value is converted over one axis after the other, in the cheaper order: each conversion moves what the other axis leaves of
  it at that moment. The outer part of an atom is not converted while the other axis has the inner one.

    pairs = Pairs(weights, tokens, same={})
    pairs[node][k]                              # a strategy over both
    pairs.parts[node][k]                        # its places in pairs.over[0][node] and pairs.over[1][node]
    PairPrices(pairs).conversions(node, sources, targets)
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from functools import partial
from itertools import product

import numpy as np
from torch.fx import Node

from autoptd.ir.layout import Layout
from autoptd.ir.notes import note, payload, value
from autoptd.ir.operators.record import QUERIES, argument, operands
from autoptd.ir.types import I, R, Segmented
from autoptd.passes.ops.costs import collective_seconds, compute_seconds, conversion_seconds, flops
from autoptd.passes.solve.prices import edge_price, gathers_again, odd_price, places, tabulate
from autoptd.passes.solve.queries import work_parts
from autoptd.passes.solve.strategies import MICROBATCHES_PER_STEP, Splitter
from autoptd.passes.solve.strategy import Strategy
from autoptd.passes.solve.tied import Strategies
from autoptd.passes.solve.tokens import TokenSplitter


class Pairs(dict[Node, list[Strategy]]):
    """The pairs of strategies of every node, made on first use; tied nodes have those of the node they are tied to."""

    def __init__(self, weights: Splitter, tokens: TokenSplitter, same: dict[Node, Node]) -> None:
        super().__init__()
        self.weights, self.tokens, self.mesh = weights, tokens, weights.mesh
        self.over = Strategies(weights, same), Strategies(tokens, same)
        self.parts: dict[Node, list[tuple[int, int]]] = {}
        self._merged: dict[tuple[Layout, Layout], Layout] = {}

    def __missing__(self, node: Node) -> list[Strategy]:
        self[node], self.parts[node] = [], []
        read = list(dict.fromkeys(operands(node))) if node.op == "call_function" else []
        # The first axis is the slow one: strategies that are whole over tp come first, as in its own list.
        for i, first in enumerate(self.over[0][node]):
            for j, second in enumerate(self.over[1][node]):
                values = [(node, first.gives, second.gives)]
                values += [(operand, first.needs[operand], second.needs[operand]) for operand in read]
                # The places of causal queries are those along one axis.
                is_twice = first.form == second.form == QUERIES and argument(node, "is_causal")
                if not is_twice and all(self.divides(*each) for each in values):
                    self[node].append(self._pair(node, first, second))
                    self.parts[node].append((i, j))
        return self[node]

    def _pair(self, node: Node, first: Strategy, second: Strategy) -> Strategy:
        needs = {operand: self.merged(types, second.needs[operand]) for operand, types in first.needs.items()}
        gives = self.merged(first.gives, second.gives)
        return Strategy(needs, gives, self._seconds(node, first, second), f"{first.why}; {second.why}")

    def merged(self, first: Layout, second: Layout) -> Layout:
        """Return the layout with the types over both axes."""
        key = first, second
        if key not in self._merged:
            self._merged[key] = Layout(dict(first.types) | dict(second.types))
        return self._merged[key]

    def divides(self, node: Node, first: Layout, second: Layout) -> bool:
        """Tell whether the atoms of a value that both axes cut have an equal part for every rank."""
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
            # Ranks along cp have all of what a tensor rank stores, and sum its gradient once a step.
            nbytes, machine = payload(node) / first.gives.pieces(self.mesh), self.tokens.machine
            seconds = first.seconds
            for axis, kind in second.gives.types:
                if kind == R:
                    summed = conversion_seconds(I, R, nbytes, self.mesh.degree(axis), machine)
                    seconds += summed / MICROBATCHES_PER_STEP
            return seconds
        whole = compute_seconds(node, self.weights.machine)
        cut = [self._cut(node, strategy) for strategy in (first, second)]
        # What each axis adds to its part of the work: a product that is repeated, reductions inside.
        extra = first.seconds - whole / cut[0] + second.seconds - whole / cut[1]
        return whole / cut[0] / cut[1] + extra

    def _cut(self, node: Node, strategy: Strategy) -> float:
        """Return by how much a strategy divides the work of a product; nothing else is credited for a split."""
        if not flops(node):
            return 1
        pieces = max(types.pieces(self.mesh) for types in (strategy.gives, *strategy.needs.values()))
        cut = {operand for operand, types in strategy.needs.items() if types.shards}
        return work_parts(node, cut, pieces)


def common_places(first: Layout, second: Layout) -> frozenset[tuple[int, int]]:
    """Return the atoms that both layouts cut: their dim, and their place in it."""
    return first.cut_places & second.cut_places


class PairPrices:
    """The prices of `prices.Prices`, of types over both axes."""

    def __init__(self, pairs: Pairs) -> None:
        self.pairs, self.splitters = pairs, (pairs.weights, pairs.tokens)
        self._parts: dict[Layout, tuple[Layout, Layout]] = {}
        # By kind of value: see `_kind`.
        self._tables: dict[tuple[Hashable, tuple[Layout, ...], tuple[Layout, ...]], np.ndarray] = {}
        self._is_free: dict[tuple[int, Node, Layout, Layout], bool] = {}
        self._prices: dict[tuple[int, Node, Layout, Layout, int], float] = {}

    @property
    def loss(self) -> Layout:
        return self.pairs.merged(self.pairs.weights.loss, self.pairs.tokens.loss)

    def parts(self, layouts: list[Layout]) -> tuple[list[Layout], list[Layout]]:
        """Return the types over tp, and those over cp."""
        for layout in layouts:
            if layout not in self._parts:
                first, second = self.splitters
                self._parts[layout] = layout.over(first.axis), layout.over(second.axis)
        both = [self._parts[layout] for layout in layouts]
        return [first for first, _ in both], [second for _, second in both]

    def _kind(self, node: Node) -> Hashable:
        """Return all that the price of a conversion depends on of a value."""
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
            # The first conversion finds what the source has over the other axis, the second what the target has.
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
        # Of a value that the other axis cuts, a part is converted: there are few numbers of these.
        cut = [types.pieces(self.pairs.mesh) for types in different[2]]
        numbers = sorted(set(cut))
        prices = [self._price(axis, node, *each) for each in product(*different[:2], numbers)]
        sizes = [len(each) for each in different]
        table = np.reshape(prices, (*sizes[:2], len(numbers)))[:, :, np.searchsorted(numbers, cut)]
        free = [self._free(axis, node, each, different[2]) for each in different[:2]]
        table = np.where(free[0][:, None] & free[1][None], table, math.inf)
        for i, j in product(*map(range, sizes[:2])):
            if different[0][i] == different[1][j]:
                table[i, j] = 0.0
        return table[rows[:, None], columns[None], third[:, None] if is_first else third[None]]

    def _free(self, axis: int, node: Node, layouts: list[Layout], held: list[Layout]) -> np.ndarray:
        """Tell which of `layouts` may be converted, or come of it, while the value has types `held` over the other axis."""
        free = []
        for key in product((axis,), (node,), layouts, held):
            if key not in self._is_free:
                self._is_free[key] = self._may_move(*key)
            free.append(self._is_free[key])
        return np.reshape(free, (len(layouts), len(held)))

    def _may_move(self, axis: int, node: Node, layout: Layout, other: Layout) -> bool:
        if not self.pairs.divides(node, layout, other):
            return False
        # Of tokens tp has the inner part, of all else cp.
        shared = common_places(layout, other)
        return all(axis == (0 if self.pairs.tokens.is_token(node, place) else 1) for place in shared)

    def _price(self, axis: int, node: Node, source: Layout, target: Layout, pieces: int) -> float:
        """Return the price of a conversion over one axis of what the other one leaves, one of `pieces`."""
        key = axis, node, source, target, pieces
        if key not in self._prices:
            self._prices[key] = edge_price(self.splitters[axis], node, source, target, pieces=pieces)
        return self._prices[key]

    def saved(
        self, node: Node, reader: Node, savers: list[Node], sources: list[Layout], targets: list[Layout]
    ) -> np.ndarray:
        shape = len(sources), len(targets)
        if reader not in savers:
            return np.zeros(shape)
        machine, mesh, nbytes = self.pairs.weights.machine, self.pairs.mesh, payload(node)
        before, after = self.parts(sources), self.parts(targets)
        pieces, again = [], []
        for k, splitter in enumerate(self.splitters):
            gathers = partial(gathers_again, splitter, reader)
            again.append(tabulate(gathers, before[k], after[k]))
            cut = np.array([types.pieces(mesh) for types in after[k]])[None]
            pieces.append(np.where(again[k], splitter.degree, cut))
        seconds = nbytes / pieces[0] / pieces[1] * machine.per_saved_byte
        for k, splitter in enumerate(self.splitters):
            other = np.array([types.pieces(mesh) for types in after[1 - k]])
            gathered = [
                collective_seconds("all-gather", nbytes / cut, splitter.degree, machine) for cut in other
            ]
            seconds = seconds + again[k] * np.array(gathered)[None]
            seconds = seconds + (pieces[k] == 1) * nbytes / pieces[1 - k] * splitter.per_whole_byte
        return seconds / len(savers)

    def odd_layers(self, node: Node, entered: list[Layout], read: list[Layout]) -> np.ndarray:
        before, after = self.parts(entered), self.parts(read)
        total = np.zeros((len(entered), len(read)))
        for k, splitter in enumerate(self.splitters):
            total += tabulate(partial(odd_price, splitter, node), before[k], after[k])
        return total


__all__ = ["PairPrices", "Pairs"]
