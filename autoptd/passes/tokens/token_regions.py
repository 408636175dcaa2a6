"""Let a part of a graph read all tokens, and cut what comes out of it (see `shift.py`).

In: a TRACED graph, and the `Region` that is to read all tokens. Out: the graph, in which its operators read what slices cut
before, operands without parameters are padded, and what other operators read of it is cut. All of it keeps its place and name.

    uncut(graph, region)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from autoptd.errors import InternalError
from autoptd.ir.notes import Note, note, op_name, set_note, shape, site, value
from autoptd.ir.operators.record import argument, operands, set_arguments
from autoptd.ir.operators.table import operator_of

aten = torch.ops.aten
UNFLATTEN = "aten.unflatten"


@dataclass(frozen=True)
class Cut:
    """The `length` tokens from `start` on, of `size`."""

    start: int
    length: int
    size: int


@dataclass(frozen=True)
class Place:
    """A dim of a value with the tokens as its first factor, its last one, or both: all of it."""

    dim: int
    is_first: bool
    is_last: bool


@dataclass
class Region:
    """What is to read all tokens, where it read those of a cut.

    - `sources`: what the slices cut, by slice.
    - `fills`: the slices and all operators of the region, in the order of the graph, each with the numbers that pad its
      operands without parameters.
    - `readers`: what reads a value of the region, and is not in it: it gets that value cut.
    - `places`: where values have the tokens, operands without parameters among them.
    """

    cut: Cut
    sources: dict[Node, Node]
    fills: dict[Node, dict[Node, int]] = field(default_factory=dict)
    readers: dict[Node, list[Node]] = field(default_factory=dict)
    places: dict[Node, Place] = field(default_factory=dict)

    def renamed(self, node_of: Mapping[Node, Node]) -> Region:
        """Return the region of another trace of the same model."""
        fills, readers = {}, {}
        for node, padded in self.fills.items():
            fills[node_of[node]] = {node_of[operand]: fill for operand, fill in padded.items()}
        for node, them in self.readers.items():
            readers[node_of[node]] = [node_of[reader] for reader in them]
        places = {node_of[node]: place for node, place in self.places.items()}
        sources = {node_of[node]: node_of[source] for node, source in self.sources.items()}
        return Region(self.cut, sources, fills, readers, places)


def uncut(graph: Graph, region: Region) -> None:
    """Rewrite `graph` in place."""
    editor = _Editor(graph, region)
    for node, fills in region.fills.items():
        if node not in region.sources:
            editor.read_all(node, fills)
    for node, readers in region.readers.items():
        # A slice is cut directly.
        if node not in region.sources:
            piece = editor.cut(node)
            for reader in readers:
                reader.replace_input_with(node, piece)


class _Editor:
    def __init__(self, graph: Graph, region: Region) -> None:
        self.graph, self.region = graph, region
        self.padded: dict[tuple[Node, int], Node] = {}

    def read_all(self, node: Node, fills: Mapping[Node, int]) -> None:
        """Let an operator read all tokens."""
        wanted = {x: self.pad(x, fill, node) for x, fill in fills.items()}
        self._read(node, {**self.region.sources, **wanted}, self._whole_shape(node))

    def pad(self, x: Node, fill: int, reader: Node) -> Node:
        """Return an operand without parameters padded to all tokens: what it is a view of, and then the view."""
        if (x, fill) not in self.padded:
            is_view = x.op == "call_function" and operator_of(x).moves in ("fold", "same")
            source = operands(x)[0] if is_view else x
            if source in self.region.places and source is not x:
                padded = self.pad(source, fill, reader)
                made = Maker(self.graph, reader, note(x)).make(x.target, *x.args, **x.kwargs)
                self._read(made, {source: padded}, self._whole_shape(x))
            else:
                made = self._pad(x, fill, reader)
            self.padded[x, fill] = made
        return self.padded[x, fill]

    def _pad(self, x: Node, fill: int, reader: Node) -> Node:
        cut, place = self.region.cut, self.region.places[x]
        about = replace(note(reader), of_params=False, needs_grad=False)
        maker = Maker(self.graph, reader, about)
        apart, dim = _unfold(maker, x, place, cut.length)
        # (left, right) of the last dim, then of the one before it, ...
        amounts = [0, 0] * (len(shape(apart)) - 1 - dim) + [cut.start, cut.size - cut.start - cut.length]
        return _fold(maker, maker.make(aten.constant_pad_nd.default, apart, amounts, fill), place)

    def cut(self, node: Node) -> Node:
        """Return the tokens of a value of the region that the slices left."""
        cut, place = self.region.cut, self.region.places[node]
        maker = Maker(self.graph, node.next, note(node))
        apart, dim = _unfold(maker, node, place, cut.size)
        piece = maker.make(aten.slice.Tensor, apart, dim, cut.start, cut.start + cut.length)
        note(piece).tokens = replace(note(piece).tokens, is_moved_cut=True)
        return _fold(maker, piece, place)

    def _read(self, node: Node, wanted: Mapping[Node, Node], size: tuple[int, ...]) -> None:
        """Let a node read other operands, and give a value of this shape."""
        node.args = map_arg(node.args, lambda arg: wanted.get(arg, arg))
        node.kwargs = map_arg(node.kwargs, lambda arg: wanted.get(arg, arg))
        # Of `unflatten`, sizes of the dims from that one on.
        first = argument(node, "dim") % len(shape(operands(node)[0])) if op_name(node) == UNFLATTEN else 0
        for name in operator_of(node).sizes:
            given = argument(node, name)
            sizes = [-1 if old == -1 else size[first + i] for i, old in enumerate(given)]
            set_arguments(node, {name: sizes})
        _evaluate(node)
        if shape(node) != size:
            raise InternalError(site(node), f"{op_name(node)} of all tokens is {shape(node)}, not {size}")

    def _whole_shape(self, node: Node) -> tuple[int, ...]:
        """Return the shape of a value once it has all tokens."""
        size, place = list(shape(node)), self.region.places.get(node)
        if place is not None:
            size[place.dim] = size[place.dim] // self.region.cut.length * self.region.cut.size
        return tuple(size)


def _unfold(maker: Maker, x: Node, place: Place, count: int) -> tuple[Node, int]:
    """Return a value whose `count` tokens are a dim of its own, and that dim."""
    if place.is_first and place.is_last:
        return x, place.dim
    sizes = [count, -1] if place.is_first else [-1, count]
    return maker.make(aten.unflatten.int, x, place.dim, sizes), place.dim + place.is_last


def _fold(maker: Maker, x: Node, place: Place) -> Node:
    """Undo `_unfold`."""
    if place.is_first and place.is_last:
        return x
    return maker.make(aten.flatten.using_ints, x, place.dim, place.dim + 1)


class Maker:
    """Makes operators in front of a node, with the facts of `about`."""

    def __init__(self, graph: Graph, before: Node, about: Note) -> None:
        self.graph, self.before, self.about = graph, before, about

    def make(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        with self.graph.inserting_before(self.before):
            made = self.graph.call_function(target, args, kwargs)
        set_note(made, replace(self.about, kind="op", name=""))
        _evaluate(made)
        return made


def _evaluate(node: Node) -> None:
    """Find the fake value of a node."""
    args, kwargs = map_arg((node.args, node.kwargs), value)
    with torch.no_grad():
        node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]


__all__ = ["Cut", "Maker", "Place", "Region", "uncut"]
