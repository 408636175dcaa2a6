"""The prices that the solver pays: for converting a value, for saving it for backward, and for an odd first layer.

In: a value, its types, a reader. Out: seconds, infinite for an impossible conversion. `AxisPrices` has the prices of one axis;
those of two axes at once (`joint.py`) are made of the same functions.

    prices = AxisPrices(splitter)
    prices.conversions(node, sources, targets)      # an array [source, target]
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from itertools import product

import numpy as np
from torch.fx import Node

from autoptd.ir.layout import Layout, Step
from autoptd.ir.machine import Machine
from autoptd.ir.notes import note, op_name, value
from autoptd.ir.types import R, ValueType, padded_size
from autoptd.passes.ops.costs import collective_seconds, conversion_price, odd_layer_price
from autoptd.passes.solve.splits import Splitter

PARAMETER_USES = {("I", "P"), ("I", "R"), ("I", "S"), ("R", "S")}
# The price of one conversion, with the signature of costs.conversion_seconds.
Price = Callable[[ValueType, ValueType, float, int, Machine], float]


class AxisPrices:
    """The prices over some axes, given their splitters; those of conversions are cached for all problems of a graph."""

    def __init__(self, *splitters: Splitter) -> None:
        self.splitters, self.mesh = splitters, splitters[0].mesh
        self._price = [cache(partial(edge_price, splitter)) for splitter in splitters]
        self._over = cache(lambda layout: [layout.over(splitter.axis) for splitter in splitters])

    @property
    def loss(self) -> Layout:
        return Layout({axis: kind for splitter in self.splitters for axis, kind in splitter.loss.types})

    def conversions(self, node: Node, sources: list[Layout], targets: list[Layout]) -> np.ndarray:
        """Return the prices over one axis; those over two depend on their order (`joint.py`)."""
        return tabulate(partial(self._price[0], node), sources, targets)

    def parts(self, layouts: list[Layout]) -> list[list[Layout]]:
        """Return the types over each axis."""
        return [list(each) for each in zip(*map(self._over, layouts), strict=True)]

    def saved(
        self, node: Node, reader: Node, savers: list[Node], sources: list[Layout], targets: list[Layout]
    ) -> np.ndarray:
        if reader not in savers:
            return np.zeros((len(sources), len(targets)))
        machine, nbytes = self.splitters[0].machine, self.splitters[0].nbytes(node)
        before, after = self.parts(sources), self.parts(targets)
        again, cuts, pieces = [], [], []
        for k, splitter in enumerate(self.splitters):
            cuts.append(np.array([types.pieces(self.mesh) for types in after[k]])[None])
            again.append(tabulate(partial(gathers_again, splitter, reader), before[k], after[k]))
            # A reader that gathers its operand again saves only the shards.
            pieces.append(np.where(again[k], splitter.degree, cuts[k]))
        seconds = nbytes / math.prod(pieces) * machine.per_saved_byte
        for k, splitter in enumerate(self.splitters):
            # The part of the value that the other axes leave.
            read, saved = (nbytes / math.prod(each[:k] + each[k + 1 :]) for each in (cuts, pieces))
            seconds = seconds + again[k] * collective_seconds("all-gather", read, splitter.degree, machine)
            seconds = seconds + (pieces[k] == 1) * saved * splitter.per_whole_byte
        return seconds / len(savers)

    def odd_layers(self, node: Node, entered: list[Layout], read: list[Layout]) -> np.ndarray:
        over = zip(self.splitters, self.parts(entered), self.parts(read), strict=True)
        return sum(tabulate(partial(odd_price, splitter, node), *types) for splitter, *types in over)


def tabulate(
    price: Callable[[Layout, Layout], float], rows: list[Layout], columns: list[Layout]
) -> np.ndarray:
    """Return the prices [row, column]; equal pairs are computed once."""
    different, others = list(dict.fromkeys(rows)), list(dict.fromkeys(columns))
    table = np.array([price(*both) for both in product(different, others)])
    table = table.reshape(len(different), len(others))
    return table[np.ix_(places(rows, different), places(columns, others))]


def places(layouts: list[Layout], different: list[Layout]) -> list[int]:
    """Return the index of each of `layouts` in `different`."""
    place = {layout: i for i, layout in enumerate(different)}
    return [place[layout] for layout in layouts]


def odd_price(splitter: Splitter, node: Node, entered: Layout, read: Layout) -> float:
    """Return the price of a first layer that reads `entered`, when later ones `read` another type.

    Without it, the cheapest first layer would often differ from all others for a few nanoseconds. A type that is hard to
    read (`Splitter.is_plain`) costs as much.
    """
    is_odd = entered != read or not splitter.is_plain(node, entered)
    return odd_layer_price(splitter.nbytes(node), splitter.degree, splitter.machine) if is_odd else 0.0


def gathers_again(splitter: Splitter, reader: Node, source: Layout, target: Layout) -> bool:
    """Tell whether backward of `reader` all-gathers its operand again, so that only the shards are saved."""
    # S -> R alone, by the same criterion as `gather_again` in `kept/requested.py`.
    is_gather = bool(source.shards) and not source.sub_axes and target == splitter.over(R)
    return is_gather and op_name(reader) in ("aten.linear", "aten.addmm")


def edge_price(
    splitter: Splitter,
    node: Node,
    source: Layout,
    target: Layout,
    count: Price = conversion_price,
    pieces: int = 1,
) -> float:
    """Return the price of converting the value of `node`; infinite if that is impossible.

    `count` returns the price of one step; with `costs.conversion_seconds`, the result is the time that the conversion takes.
    Another axis that is solved at the same time cuts the value into `pieces`, and one of them is converted.
    """
    if source == target:
        return 0.0
    path = splitter.path(source, target)
    if path is None or not _is_possible(splitter, node, path):
        return math.inf
    seconds = 0.0
    for step in path:
        nbytes, degree = splitter.nbytes(node) / step.others / pieces, splitter.mesh.degree(step.axis)
        seconds += count(step.before, step.after, nbytes, degree, splitter.machine)
    return seconds


def _is_possible(splitter: Splitter, node: Node, path: list[Step]) -> bool:
    # The pieces of a split are converted one by one, after their getitem.
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
