"""Find the layers of a model that a picture can tell by showing one of them.

In: the shown operators of each stage (see `views`). Out: for a layer of a stage, the earlier layer that it equals, wholly or
in a part: a cut may go through a layer. Names of layers, numbers of dropout sites and floats are not compared; operators,
shapes, types over tp and the wiring are.

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
from autoptd.viz.views import origin

# Operators of a piece that is worth folding.
LEAST = 3


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
        row = [_operator(node, piece.layer) for node in piece.nodes]
        for layer, other in self.rows.items():
            at = _find_run(row, other)
            if at is not None:
                where = "first" if at == 0 else "last" if at + len(row) == len(other) else "middle"
                return Like(layer, f"{where} {len(row)} of {len(other)} operators")
        self.wholes[whole] = piece.layer
        self.rows.setdefault(piece.layer, row)
        return None


def layer_of(node: Node) -> str:
    """The module path up to its first number (`transformer.h.3`), "" outside of layers."""
    match = re.match(r"(?:.*?\.)??\d+(?=\.|$)", note(node).module)
    return match[0] if match else ""


def pieces_of(body: Sequence[Node]) -> dict[str, Piece]:
    """The pieces of the shown operators of a stage, by layer; a layer that others interrupt has none."""
    nodes: dict[str, list[Node]] = {}
    for node in body:
        nodes.setdefault(layer_of(node), []).append(node)
    nodes.pop("", None)
    place = {node: i for i, node in enumerate(body)}
    return {
        layer: Piece(layer, tuple(row))
        for layer, row in nodes.items()
        if len(row) >= LEAST and place[row[-1]] - place[row[0]] == len(row) - 1
    }


def _find_run(row: list[Hashable], other: list[Hashable]) -> int | None:
    """Where `row` begins in `other`."""
    starts = range(len(other) - len(row) + 1)
    return next((i for i in starts if other[i] == row[0] and other[i : i + len(row)] == row), None)


def _operator(node: Node, layer: str) -> Hashable:
    """What the picture tells of one operator, without names."""
    record = note(node)
    args: tuple[Any, ...] = node.args
    # The number of a dropout.
    keywords = {key: arg for key, arg in node.kwargs.items() if key != "site"}
    if node.target is markers.dropout:
        # Likewise.
        args = (*args[:2], *args[3:])
    literals = map_aggregate((args, keywords), lambda arg: "." if isinstance(arg, (Node, float)) else arg)
    local = record.module.removeprefix(layer)
    return (
        str(node.target),
        str(literals),
        local,
        record.layout,
        str(record.extra.get("local_shapes")),
        record.conversion,
    )


def _wiring(piece: Piece) -> Hashable:
    """All operators of a piece, and which reads which."""
    place = {node: i for i, node in enumerate(piece.nodes)}

    def operand(arg: Node) -> Hashable:
        if arg in place:
            return place[arg]
        record = note(arg)
        own = record.name.removeprefix(f"{piece.layer}.")
        kind = "value" if record.kind in ("op", "input") else record.kind
        return kind, own if own != record.name else "", record.layout

    return tuple(
        (_operator(node, piece.layer), tuple(operand(origin(arg)) for arg in node.all_input_nodes))
        for node in piece.nodes
    )


__all__ = ["Like", "Piece", "Shown", "layer_of", "pieces_of"]
