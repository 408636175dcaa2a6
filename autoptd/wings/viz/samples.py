"""Draw a layer that repeats apart from the stages, which then hold one box for all of its kind.

In: the operators of every stage. Out: what each repeated layer is like, and a `Sample` of each kind of layer:
its boxes, what flows between them, and the values that it reads of the rest of the model.

    likes, apart = find_repeats(bodies)             # likes[0]["h.1"].layer == "h.0"
    draw_sample(0, *apart[0], likes, made).layers   # ("h.0", "h.1", "h.2")
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch.fx import Node

from autoptd.ir.notes import note
from autoptd.wings.viz.alike import Like, Piece, Shown, pieces_of
from autoptd.wings.viz.boxes import Box, BoxAdder, Edge, Home, inner_edges
from autoptd.wings.viz.node_calls import Calls
from autoptd.wings.viz.views import is_shown, origin

# What the layers of every stage are like, by stage and layer.
Likes = dict[int, dict[str, Like]]


@dataclass(frozen=True)
class Sample:
    """One layer of several that are alike: `layers` are the whole ones, itself included, in order."""

    layer: str
    layers: tuple[str, ...]
    stages: tuple[int, ...]
    boxes: tuple[Box, ...]
    edges: tuple[Edge, ...]


def find_repeats(bodies: Mapping[int, list[Node]]) -> tuple[Likes, list[tuple[int, Piece]]]:
    """Return what the layers that repeat are like, and the first of each kind with its stage."""
    shown = Shown()
    likes: Likes = {stage: {} for stage in bodies}
    first: list[tuple[int, Piece]] = []
    repeated: set[str] = set()
    for stage, body in bodies.items():
        for layer, piece in pieces_of([node for node in body if is_shown(node)]).items():
            like = shown.find(piece)
            if like is None:
                first.append((stage, piece))
            else:
                likes[stage][layer] = like
                repeated.add(like.layer)
    apart = [(stage, piece) for stage, piece in first if piece.layer in repeated]
    # The first of a kind is folded as well: the stages show all layers alike.
    for stage, piece in apart:
        likes[stage][piece.layer] = Like(piece.layer)
    return likes, apart


def draw_sample(number: int, stage: int, piece: Piece, likes: Likes, made: Calls) -> Sample:
    """Return the boxes of one layer; `number` counts the samples of a picture."""
    # Columns of stages count from 0 up, samples from -1 down.
    place = -1 - number
    # The stage's own box takes the collectives: a sample shows them a second time.
    adder = BoxAdder(place, f"layer{number}", [], dict(made))
    for node in piece.nodes:
        adder.add(node, stage, {})
    outer = [Box(f"from_layer{number}_{values[0].name}", place, "", "", values) for values in _outer(piece)]
    home: Home = {}
    for box in (*outer, *adder.boxes):
        home |= dict.fromkeys(((place, node) for node in box.nodes), box.id)
    layers: dict[str, None] = {}
    stages: dict[int, None] = {}
    for k, found in likes.items():
        # Parts of layers are not counted: some of their operators are elsewhere.
        same = [layer for layer, like in found.items() if like == Like(piece.layer)]
        layers |= dict.fromkeys(same)
        stages |= dict.fromkeys([k] if same else [])
    edges = inner_edges(adder.boxes, place, home)
    return Sample(
        piece.layer, tuple(sorted(layers, key=_number)), tuple(stages), (*outer, *adder.boxes), tuple(edges)
    )


def _outer(piece: Piece) -> list[list[Node]]:
    """Return the values that a layer reads of the rest of the model: its input, masks, rotary tables.

    Tables of one module, such as cosine and sine, share a box.
    """
    inside = set(piece.nodes)
    read: dict[tuple[str, bool, str], list[Node]] = {}
    for node in piece.nodes:
        for value in map(origin, node.all_input_nodes):
            if value in inside or note(value).kind not in ("op", "input"):
                continue
            record = note(value)
            own = value.name if record.needs_grad else ""
            values = read.setdefault((record.module, record.needs_grad, own), [])
            if value not in values:
                values.append(value)
    # The layer's input comes last, next to its first operator: their link is drawn straight.
    return sorted(read.values(), key=lambda values: note(values[0]).needs_grad)


def _number(layer: str) -> tuple[str, int]:
    """Return a key that sorts `h.2` before `h.10`."""
    prefix, _, number = layer.rpartition(".")
    return prefix, int(number)


__all__ = ["Likes", "Sample", "draw_sample", "find_repeats"]
