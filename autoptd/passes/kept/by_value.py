"""Choose for every value of a layer whether it is kept for backward or recomputed: recompute="auto".

In: a LOCAL graph, what every operator saves, the pins of a plan, and the price that a stage pays per byte (`Rate`).
Out: a `Wish`, like those for the other values of `recompute` (`requested.py`).

Each layer is solved by itself, exactly; equal layers are solved once (`Region`: operators and values by number). A
kept byte costs the price; an operator that runs again costs its seconds, and every value that it reads must be
there, kept or recomputed. Values that a layer reads from outside, and values that are read after it, can only be
kept.

Let A(v): value v is available in backward, R(o): operator o runs again; a value costs its bytes if A(v) and not
R(its maker). "R(o) implies A(v) for all v that o reads and makes" and the costs of single A and R form a closure
problem (Picard 1976), whose optimum is a minimum cut of a graph with one node for each. Only seconds are rounded, to
whole attoseconds. Of equal costs the one with fewer operators is taken, so that a higher price never keeps more
bytes.

    runs_again(Region(makes=((0,), (1,)), reads=((), (0,)), seconds=(1e-6, 1e-6), ...), price=1e-9)     # {1}
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache, partial
from math import inf
from typing import NamedTuple

import networkx as nx
from torch.fx import Graph, Node

from autoptd.ir.kept import Rate, SavedForBackward, Storage
from autoptd.ir.machine import Machine
from autoptd.ir.mesh import Mesh
from autoptd.ir.notes import is_tensor, note
from autoptd.passes.kept.requested import (
    Pinned,
    Wish,
    find_gathered,
    groups_of_layers,
    is_repeatable,
    operands_of,
)
from autoptd.passes.ops.costs import forward_seconds

SOURCE, SINK = "runs", "rests"
PER_SECOND = 10**18


class ByValue:
    """The layers of a graph, each with the cheapest choice for every price that was requested."""

    def __init__(
        self, graph: Graph, saved: SavedForBackward, pinned: Pinned, mesh: Mesh, machine: Machine
    ) -> None:
        # A gathered value is not kept whole: its readers keep the shard, and gather it again.
        shards = {pair.whole: pair.shard for pair in find_gathered(graph, saved)}
        needed = {
            shards.get(storage, storage)
            for storages in saved.of.values()
            for storage in storages
            if not storage.is_private
        }
        seconds = partial(forward_seconds, mesh=mesh, machine=machine)
        self._layers: dict[int, list[_Layer]] = {}
        for layer in groups_of_layers(graph, Fraction(1), 1):
            stage = note(layer[0]).stages[0]
            self._layers.setdefault(stage, []).append(_Layer(layer, saved, needed, shards, pinned, seconds))

    @property
    def most_layers(self) -> int:
        """The number of layers of the stage with the most; at least 1."""
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
        saved: SavedForBackward,
        needed: set[Storage],
        shards: dict[Storage, Storage],
        pinned: Pinned,
        seconds: Callable[[Node], float],
    ) -> None:
        self.saved, self.needed, self.shards = saved, needed, shards
        # A value that is recomputed at any price is available only if its maker runs.
        self.never_kept = {*shards, *pinned.again}
        self.never_kept |= {shard for whole, shard in shards.items() if whole in pinned.again}
        self.storages: dict[Storage, int] = {}
        # A view makes nothing, and costs nothing.
        makers = [(node, made) for node in layer if (made := self._made(node))]
        self.makes = [made for _, made in makers]
        self.reads = [self._read(node) for node, _ in makers]
        self.seconds = [self._seconds(node, seconds) for node, _ in makers]
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
        # A gathered value is dropped whole if its shard, which would be kept, is recomputed.
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
            makes=tuple(tuple(map(number, storages)) for storages in self.makes),
            reads=tuple(tuple(map(number, storages)) for storages in self.reads),
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

    def _seconds(self, node: Node, seconds: Callable[[Node], float]) -> float:
        if not is_repeatable(node):
            return inf
        # Backward gathers it in any case.
        is_gathered = self.saved.storage(node) in self.shards
        return 0.0 if is_gathered else seconds(node)

    def _bound(self, own: set[Node], layer: list[Node]) -> set[Storage]:
        """Return the storages that operators outside of this layer make or read."""
        bound = {storage for read in self.reads for storage in read if storage.node not in own}
        for node in layer:
            if any(user not in own for user in node.users):
                bound |= {value.storage for value in self.saved.values.get(node, ())}
        return bound


class Region(NamedTuple):
    """Operators and values of a layer by number.

    - `makes`, `reads`, `seconds`: per operator, the values that it makes and reads, and its seconds (infinite if it
      may run only once).
    - `nbytes`: per value.
    - `needed`: values that backward reads; `free`: values that are available in any case; `never_kept`: values that
      are available only if their maker runs again.
    """

    makes: tuple[tuple[int, ...], ...]
    reads: tuple[tuple[int, ...], ...]
    seconds: tuple[float, ...]
    nbytes: tuple[int, ...]
    needed: frozenset[int]
    free: frozenset[int]
    never_kept: frozenset[int]


@lru_cache(maxsize=4096)
def runs_again(region: Region, price: float) -> frozenset[int]:
    """Return the operators that run again, at the lowest cost, for a `price` in seconds per byte."""
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
        # An operator that runs again makes its values for free: their bytes are counted above.
        made = sum(weights["value", v] for v in region.makes[i])
        weights["operator", i] = round(seconds * PER_SECOND) - made
        for v in region.reads[i] + region.makes[i]:
            # Without a capacity: never cut.
            graph.add_edge(("operator", i), ("value", v))
        for v in region.never_kept.intersection(region.makes[i]):
            graph.add_edge(("value", v), ("operator", i))
    for v in region.needed:
        graph.add_edge(SOURCE, ("value", v))
    # Nodes on the source's side are chosen. Leaving a node out loses its gain, choosing it pays its cost.
    for item, weight in weights.items():
        if weight > 0:
            graph.add_edge(item, SINK, capacity=weight)
        elif weight < 0:
            graph.add_edge(SOURCE, item, capacity=-weight)
    graph.add_edges_from((("value", v), SINK, {"capacity": inf}) for v in impossible)
    chosen = _smallest_side(graph)
    return frozenset(number for kind, number in chosen if kind == "operator")


def _smallest_side(graph: nx.DiGraph) -> list[tuple[str, int]]:
    """Return the nodes on the source's side of the minimum cut with the fewest of them."""
    flow = nx.algorithms.flow.preflow_push(graph, SOURCE, SINK)
    reached, left = {SOURCE}, [SOURCE]
    while left:
        at = left.pop()
        for to, edge in flow[at].items():
            if edge["flow"] < edge["capacity"] and to not in reached:
                reached.add(to)
                left.append(to)
    return [node for node in graph if node in reached and node != SOURCE]
