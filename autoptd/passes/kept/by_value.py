"""Choose for every value of a layer whether it is kept for backward or made again: recompute="auto".

In: a LOCAL graph, what every operator saves, what a plan pins of that, and what a stage pays for a byte less (`Rate`). Out: a
`Wish`, as of the choices that users name (`requested.py`). Each layer is chosen for alone and exactly (`min_cut.py`);
equal ones are solved once.

Values that a layer reads from outside, and values read after it, can only be kept."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from math import inf
from typing import NamedTuple

import networkx as nx
from torch.fx import Graph, Node

from autoptd.ir.kept import Rate
from autoptd.ir.notes import is_tensor, note
from autoptd.ir.saved import SavedForBackward, Storage
from autoptd.passes.context import Context
from autoptd.passes.kept.requested import (
    Pinned,
    Wish,
    find_gathered,
    groups_of_layers,
    is_repeatable,
    operands_of,
)
from autoptd.passes.ops.costs import forward_seconds

__all__ = ["ByValue", "Region", "runs_again"]


class ByValue:
    """The layers of a graph, each with the cheapest choice for every price that was asked for."""

    def __init__(self, graph: Graph, ctx: Context, saved: SavedForBackward, pinned: Pinned) -> None:
        # Not kept as a whole: its readers keep the shard, and gather it again.
        shards = {each.whole: each.shard for each in find_gathered(graph, saved)}
        needed = {
            shards.get(storage, storage)
            for each in saved.of.values()
            for storage in each
            if not storage.is_private
        }
        # Layers by stage.
        self._layers: dict[int, list[_Layer]] = {}
        for layer in groups_of_layers(graph, Fraction(1), 1):
            stage = note(layer[0]).stages[0]
            self._layers.setdefault(stage, []).append(_Layer(layer, ctx, saved, needed, shards, pinned))

    @property
    def most_layers(self) -> int:
        """The layers of the stage that has most of them; at least 1."""
        return max(map(len, self._layers.values()), default=1)

    def choose(self, rate_of_stage: Callable[[int], Rate]) -> Wish:
        """Return the cheapest choice for every layer, at the rate of its stage."""
        wish = Wish(set(), set())
        for stage, layers in self._layers.items():
            rate = rate_of_stage(stage)
            for layer, price in zip(layers, rate.of_layers(len(layers)), strict=True):
                chosen = layer.choose(price)
                wish.dropped.update(chosen.dropped)
                wish.kept.update(chosen.kept)
        return wish


class _Layer:
    """The operators and storages of a layer, by number."""

    def __init__(
        self,
        layer: list[Node],
        ctx: Context,
        saved: SavedForBackward,
        needed: set[Storage],
        shards: dict[Storage, Storage],
        pinned: Pinned,
    ) -> None:
        self.saved, self.needed, self.shards = saved, needed, shards
        # What is made again at any price is there only where its maker runs.
        self.never_kept = {*shards, *pinned.again}
        self.never_kept |= {shard for whole, shard in shards.items() if whole in pinned.again}
        self.storages: dict[Storage, int] = {}
        self.makes = [self._made(node) for node in layer]
        # A view makes nothing, and costs nothing.
        makers = [(node, made) for node, made in zip(layer, self.makes, strict=True) if made]
        self.makes = [made for _, made in makers]
        self.reads = [self._read(node) for node, _ in makers]
        self.seconds = [self._seconds(node, ctx) for node, _ in makers]
        self.bound = self._bound(set(layer), layer) | pinned.kept
        self.region = self._region()
        self.choices: dict[float, Wish] = {}

    def choose(self, price: float) -> Wish:
        """Return the cheapest choice at a price."""
        if price in self.choices:
            return self.choices[price]
        again = runs_again(self.region, price)
        made = {storage for i in again for storage in self.makes[i]}
        read = {storage for i in again for storage in self.reads[i]}
        # Of a gathered value that is the whole: the shard is what would be kept of it.
        made_again = made & self.needed - self.bound
        dropped = {storage for storage in made_again if storage not in self.shards.values()}
        dropped |= {whole for whole, shard in self.shards.items() if shard in made_again}
        self.choices[price] = Wish(dropped, read - made)
        return self.choices[price]

    def _region(self) -> Region:
        for storages in (*self.makes, *self.reads):
            for storage in storages:
                self.storages.setdefault(storage, len(self.storages))
        number = self.storages.__getitem__

        def numbers(storages: set[Storage]) -> frozenset[int]:
            return frozenset(map(number, storages & self.storages.keys()))

        return Region(
            makes=tuple(tuple(map(number, each)) for each in self.makes),
            reads=tuple(tuple(map(number, each)) for each in self.reads),
            seconds=tuple(self.seconds),
            nbytes=tuple(storage.nbytes for storage in self.storages),
            needed=numbers(self.needed),
            free=numbers(self.bound & self.needed),
            never_kept=numbers(self.never_kept),
        )

    def _made(self, node: Node) -> list[Storage]:
        made = (value.storage for value in self.saved.values.get(node, ()))
        return list(dict.fromkeys(storage for storage in made if storage.node is node))

    def _read(self, node: Node) -> list[Storage]:
        return list(dict.fromkeys(self.saved.storage(arg) for arg in operands_of(node) if is_tensor(arg)))

    def _seconds(self, node: Node, ctx: Context) -> float:
        if not is_repeatable(node):
            return math.inf
        # Backward gathers it in any case.
        return (
            0.0 if self.saved.storage(node) in self.shards else forward_seconds(node, ctx.mesh, ctx.machine)
        )

    def _bound(self, own: set[Node], layer: list[Node]) -> set[Storage]:
        """Return the storages that others than this layer make, or read."""
        bound = {storage for read in self.reads for storage in read if storage.node not in own}
        for node in layer:
            if any(user not in own for user in node.users):
                bound |= {value.storage for value in self.saved.values.get(node, ())}
        return bound


SOURCE, SINK = "runs", "rests"
PER_SECOND = 10**18


class Region(NamedTuple):
    """Operators and values of a layer by number: per operator what it makes and reads, its seconds (inf: runs once)."""

    makes: tuple[tuple[int, ...], ...]
    reads: tuple[tuple[int, ...], ...]
    seconds: tuple[float, ...]
    nbytes: tuple[int, ...]  # per value
    needed: frozenset[int]  # values that backward reads
    free: frozenset[int]  # values that are there in any case
    never_kept: frozenset[int]  # values that are there only where their maker runs again


@lru_cache(maxsize=4096)
def runs_again(region: Region, price: float) -> frozenset[int]:
    """Return the operators that run again, at least cost, for a `price` in seconds per byte."""
    graph = nx.DiGraph()
    graph.add_nodes_from((SOURCE, SINK))
    weights = {
        ("value", v): 0 if v in region.free else round(price * n * PER_SECOND)
        for v, n in enumerate(region.nbytes)
    }
    impossible: set[int] = set()
    for i, seconds in enumerate(region.seconds):
        if seconds == inf:
            # Nothing that reads these can run again.
            impossible |= region.never_kept.intersection(region.makes[i])
            continue
        # What runs again makes its values for nothing: their bytes are counted above.
        made = sum(weights["value", v] for v in region.makes[i])
        weights["operator", i] = round(seconds * PER_SECOND) - made
        for v in region.reads[i] + region.makes[i]:
            # Without a capacity: never cut.
            graph.add_edge(("operator", i), ("value", v))
        for v in region.never_kept.intersection(region.makes[i]):
            graph.add_edge(("value", v), ("operator", i))
    for v in region.needed:
        graph.add_edge(SOURCE, ("value", v))
    # On the side of the source is what is chosen. A gain is lost by staying behind, a cost is paid by coming along.
    for each, weight in weights.items():
        if weight > 0:
            graph.add_edge(each, SINK, capacity=weight)
        elif weight < 0:
            graph.add_edge(SOURCE, each, capacity=-weight)
    graph.add_edges_from((("value", v), SINK, {"capacity": inf}) for v in impossible)
    chosen = _smallest_side(graph)
    return frozenset(number for kind, number in chosen if kind == "operator")


def _smallest_side(graph: nx.DiGraph) -> list[tuple[str, int]]:
    """Return the nodes on the source's side of the minimum cut that has fewest of them."""
    flow = nx.algorithms.flow.preflow_push(graph, SOURCE, SINK)
    reached, left = {SOURCE}, [SOURCE]
    while left:
        at = left.pop()
        for to, edge in flow[at].items():
            if edge["flow"] < edge["capacity"] and to not in reached:
                reached.add(to)
                left.append(to)
    return [each for each in graph if each in reached and each != SOURCE]
