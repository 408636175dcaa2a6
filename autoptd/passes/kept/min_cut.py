"""Choose the values that are kept for backward, and those that it makes again, at a price per byte: exactly, as a minimum cut.

In: what operators make of what (`Region`: numbers, so that equal layers are solved once), and a price. Out: the operators
that run again. Of what is kept each byte costs the price; an operator that runs again costs its seconds, and must find what
it reads, kept or made again.

Say A(v): value v is there in backward, R(o): operator o runs again; a value costs its bytes where A(v) and not R(its maker).
"R(o) implies A(v) for all that o reads and makes" and the costs of single A and R are a closure problem (Picard 1976), whose
optimum is a minimum cut of a graph with one node for each. Nothing is rounded but seconds, to whole attoseconds. Of equal
costs the one with fewer operators is taken, so that a higher price never keeps more bytes.

    runs_again(Region(makes=((0,), (1,)), reads=((), (0,)), seconds=(1e-6, 1e-6), ...), price=1e-9)     # {1}
"""

from __future__ import annotations

from functools import lru_cache
from math import inf
from typing import NamedTuple

import networkx as nx

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


__all__ = ["Region", "runs_again"]
