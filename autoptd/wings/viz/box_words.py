"""Words for what is in a box: its shape, what it equals, what a conversion does.

likeness([Like("h.0"), Like("h.0")])        # ["2 layers like h.0"]
shape_text(node)                            # "[1, 128, 768]"
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from torch.fx import Node

from autoptd.ir.notes import note, tensor
from autoptd.ir.types import CONVERSIONS, Conversion
from autoptd.wings.viz.alike import Like
from autoptd.wings.viz.boxes import Box
from autoptd.wings.viz.views import COLLECTIVES, origin, short_op
from autoptd.wings.words import plural


def likeness(likes: Sequence[Like]) -> list[str]:
    """Describe what folded layers equal: `5 layers like h.0`, `4 layers, like h.0, h.1 in turn`, `the last
    12 of 20 operators of h.0`.
    """
    # A part that a cut left tells less than a whole layer: it comes after them.
    wholes = [like.layer for like in likes if not like.part]
    models = list(dict.fromkeys(map(short, wholes)))
    texts = []
    if len(models) > 1:
        texts.append(f"{len(wholes)} layers, like {', '.join(models)} in turn")
    elif models:
        texts.append(f"{plural(len(wholes), 'layer')} like {models[0]}")
    parts = Counter(f"the {like.part} of {short(like.layer)}" for like in likes if like.part)
    for text, count in parts.items():
        texts.append(f"{count} x {text}" if count > 1 else text)
    return texts


def short(module: str) -> str:
    """Return the last two names of a layer's path: `h.3` of `transformer.h.3`."""
    return ".".join(module.split(".")[-2:])


def range_text(layers: Sequence[str]) -> str:
    """Name layers by the first and the last: `h.0 ... h.5`."""
    return f"{short(layers[0])} ... {short(layers[-1])}" if len(layers) > 1 else short(layers[0])


def shape_text(node: Node) -> str:
    """Return the local shape of a value."""
    shape = note(node).local.shapes[0]
    return str(list(shape)) if shape else "a number"


def local_bytes(node: Node) -> int:
    """Return the bytes of a rank's part of a value."""
    return math.prod(note(node).local.shapes[0]) * tensor(node).element_size()


def is_sum(box: Box) -> bool:
    """Tell whether a box adds two activations: where a residual stream takes a branch in."""
    node = box.nodes[-1]
    # An addend that is a constant, or a parameter such as a bias, makes no residual sum.
    origins = [origin(arg) for arg in node.all_input_nodes]
    return len(box.nodes) == 1 and short_op(node) == "add" and len(origins) == 2 and not box.params


def conversion_of(node: Node) -> Conversion:
    """Find the row of the table of conversions that a node performs."""
    return next(row for row in CONVERSIONS.values() if row.name == note(node).conversion)


def work_of(box: Box) -> tuple[str, str]:
    """Return what a conversion does forward and backward; without a gradient nothing is done backward."""
    # What it was compiled to says more than the table: without a gradient, backward is "none".
    work = box.calls[0] if box.calls else conversion_of(box.nodes[-1])
    return work.forward, work.backward


def collectives_of(box: Box) -> list[str]:
    """Return the collectives of a conversion."""
    return [kind for kind in work_of(box) if kind in COLLECTIVES]


__all__ = [
    "collectives_of",
    "conversion_of",
    "is_sum",
    "likeness",
    "local_bytes",
    "range_text",
    "shape_text",
    "short",
    "work_of",
]
