"""Find the layers of a model that a picture can tell by showing one of them.

In: the shown operators of each stage (see `views`). Out: for a layer of a stage, the earlier layer that it
equals, wholly or in a part: a cut may go through a layer. Names of layers, numbers of dropout sites and
floats are not compared; operators, shapes, types over tp and the wiring are.

layer      module path up to its first number: `transformer.h.3`.
piece      the operators of one layer in one stage, where they follow each other without others in between.

    shown = Shown()
    shown.find(Piece("transformer.h.0", nodes))      # None: drawn in full, and known from now on
    shown.find(Piece("transformer.h.1", nodes))      # Like("transformer.h.0", "")
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Node
from torch.fx.node import map_aggregate

from autoptd.ir import markers
from autoptd.ir.notes import note
from autoptd.wings.viz.views import origin

# A shorter piece is drawn in full: a box that says what it equals would take as much room.
MIN_FOLDED_OPERATORS = 3


@dataclass(frozen=True)
class Piece:
    """The operators `nodes` of `layer` in one stage, in order."""

    layer: str
    nodes: tuple[Node, ...]


@dataclass(frozen=True)
class Like:
    """The layer that a piece equals; `part` says which part of it ("" for all of it)."""

    layer: str
    part: str = ""


@dataclass
class Shown:
    """The pieces that are drawn in full: by what they do, and their operators one by one."""

    wholes: dict[Hashable, str] = field(default_factory=dict)
    rows: dict[str, list[Hashable]] = field(default_factory=dict)

    def find(self, piece: Piece) -> Like | None:
        """Return what an earlier piece tells of this one; None for a new one, which is remembered."""
        whole = _wiring(piece)
        if whole in self.wholes:
            return Like(self.wholes[whole])
        # A cut may go through a layer: its parts are found in whole ones, by operators alone, since what a
        # part reads of the other one has no place in it.
        row = [_operator(node, piece.layer) for node in piece.nodes]
        for layer, other in self.rows.items():
            start = _find_run(row, other)
            if start is not None:
                return Like(layer, _part(start, len(row), len(other)))
        # A piece that nothing equals is what later ones are compared with.
        self.wholes[whole] = piece.layer
        self.rows.setdefault(piece.layer, row)
        return None


def _part(start: int, count: int, total: int) -> str:
    """Say which operators of a layer a piece of it equals: `first 12 of 20 operators`."""
    where = "middle"
    if start == 0:
        where = "first"
    elif start + count == total:
        where = "last"
    return f"{where} {count} of {total} operators"


def layer_of(node: Node) -> str:
    """Return the module path up to its first number (`transformer.h.3`), "" outside of layers."""
    match = re.match(r"(?:.*?\.)??\d+(?=\.|$)", note(node).module)
    return match[0] if match else ""


def pieces_of(body: Sequence[Node]) -> dict[str, Piece]:
    """Return the pieces of a stage's shown operators, by layer.

    A layer that other operators interrupt has none.
    """
    nodes: dict[str, list[Node]] = {}
    for node in body:
        nodes.setdefault(layer_of(node), []).append(node)
    # What stands outside of layers never repeats.
    nodes.pop("", None)
    place = {node: i for i, node in enumerate(body)}
    pieces = {}
    for layer, row in nodes.items():
        is_unbroken = place[row[-1]] - place[row[0]] == len(row) - 1
        if is_unbroken and len(row) >= MIN_FOLDED_OPERATORS:
            pieces[layer] = Piece(layer, tuple(row))
    return pieces


def _find_run(row: list[Hashable], other: list[Hashable]) -> int | None:
    """Return where `row` begins in `other`, None where it is no part of it."""
    for start in range(len(other) - len(row) + 1):
        # The first operator alone is compared first: slices are dear, and most starts fail there.
        if other[start] == row[0] and other[start : start + len(row)] == row:
            return start
    return None


def _operator(node: Node, layer: str) -> Hashable:
    """Return what the picture shows of one operator, without names."""
    record = note(node)
    args: tuple[Any, ...] = node.args
    # Each dropout has a number of its own, as a keyword or as its third argument: layers are alike all the
    # same.
    keywords = {key: arg for key, arg in node.kwargs.items() if key != "site"}
    if node.target in (markers.dropout, markers.noise):
        args = (*args[:2], *args[3:])
    # Floats too: some models scale attention by the number of the layer.
    literals = map_aggregate((args, keywords), lambda arg: "." if isinstance(arg, (Node, float)) else arg)
    local = record.module.removeprefix(layer)
    return (
        str(node.target),
        str(literals),
        local,
        record.layout,
        str(record.local.shapes),
        record.conversion,
    )


def _wiring(piece: Piece) -> Hashable:
    """Return all operators of a piece, and which reads which."""
    place = {node: i for i, node in enumerate(piece.nodes)}

    def operand(arg: Node) -> Hashable:
        if arg in place:
            return place[arg]
        record = note(arg)
        own = record.name.removeprefix(f"{piece.layer}.")
        kind = "value" if record.kind in ("op", "input") else record.kind
        return kind, own if own != record.name else "", record.layout

    wiring = []
    for node in piece.nodes:
        operands = tuple(operand(origin(arg)) for arg in node.all_input_nodes)
        wiring.append((_operator(node, piece.layer), operands))
    return tuple(wiring)


__all__ = ["Like", "Piece", "Shown", "layer_of", "pieces_of"]
