"""Reduce the graph of a program to what a picture should show: boxes, edges, and layers that are like an earlier one.

In: a LOCAL graph, with stages, types and local shapes on its nodes. Out: an `Outline` of plain records, in graph order.

view       an operator that only rearranges (view, transpose, split, ...): not shown, edges pass through it.
box        one operator, conversion or input of one stage; or a run of small operators of one module; or folded layers.
origin     the value behind any views; for a parameter also behind a local conversion ("one rank keeps it").
folded     a layer with the operators, shapes and types of an earlier one: it is drawn as "h.1 ... h.5: as h.0".

    drawn = outline(program.graphs["LOCAL"], num_stages=4)
    drawn.boxes[0].title                # "idx"
    [edge for edge in drawn.edges if edge.crosses]
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch.fx import Graph, Node
from torch.fx.node import map_aggregate

from autoptd.ir import markers
from autoptd.ir.notes import is_tensor, note, op_name, ops, output
from autoptd.ir.types import CONVERSIONS

VIEWS = frozenset(
    "view reshape _unsafe_view flatten unflatten squeeze unsqueeze transpose permute t contiguous clone alias detach"
    " expand split split_with_sizes chunk unbind getitem".split()
)
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")
COMMUNICATES = {row.name for row in CONVERSIONS.values() if {row.forward, row.backward} & set(COLLECTIVES)}
ALONE = frozenset(
    "linear addmm matmul mm bmm baddbmm scaled_dot_product_attention embedding vocab_embedding cross_entropy"
    " cross_entropy_loss convert convolution".split()
)  # never merged with their neighbours into one box
STAGES_IN_FULL = 6  # with more stages, a layer that an earlier stage shows is folded as well


@dataclass(frozen=True)
class Box:
    """One thing to draw, in `stage`; `layer` and `part` (attn, mlp, ...) are the frames around it, "" for none.

    `nodes` are the operators it stands for; `params` are (name in the operator's module, placeholder, conversion or None).
    `folded` are the layers drawn as this one box and `like` the layers that they equal.
    """

    id: str
    stage: int
    layer: str
    part: str
    title: str
    nodes: tuple[Node, ...]
    params: tuple[tuple[str, Node, Node | None], ...] = ()
    folded: tuple[str, ...] = ()
    like: tuple[str, ...] = ()

    @property
    def is_input(self) -> bool:
        return self.nodes[0].op == "placeholder"

    @property
    def is_received(self) -> bool:
        return not self.is_input and self.stage not in note(self.nodes[0]).stages


@dataclass(frozen=True)
class Edge:
    """`value` flows from box `source` to box `target`; `crosses`: it is sent to another stage, where a box receives it."""

    source: str
    target: str
    value: Node
    crosses: bool = False


@dataclass(frozen=True)
class Tie:
    """Boxes `first` and `second` read the same parameter."""

    first: str
    second: str
    param: Node


@dataclass(frozen=True)
class Outline:
    """All there is to draw; `loss` is the id of the box that makes the result."""

    boxes: tuple[Box, ...]
    edges: tuple[Edge, ...]
    ties: tuple[Tie, ...]
    loss: str


def outline(graph: Graph, num_stages: int) -> Outline:
    """Return the boxes and edges of a LOCAL graph."""
    boxes: list[Box] = []
    seen: dict[Any, str] = {}
    for stage in range(num_stages):
        body = [node for node in ops(graph) if stage in note(node).stages]
        inputs = [node for node in graph.nodes if note(node).kind == "input" and stage in note(node).stages]
        boxes += [Box(f"s{stage}_{node.name}", stage, "", "", note(node).name, (node,)) for node in inputs]
        for node in _received(stage, body):
            boxes.append(Box(f"s{stage}_{node.name}", stage, "", "", f"from stage {note(node).stages[0]}", (node,)))
        if num_stages <= STAGES_IN_FULL:
            seen = {}
        boxes += _stage_boxes(stage, body, seen)
    home = {(box.stage, node): box.id for box in boxes for node in box.nodes}
    last = output(graph).args[0]
    assert isinstance(last, Node)
    loss = home[num_stages - 1, origin(last)]
    return Outline(tuple(boxes), tuple(_edges(boxes, home)), tuple(_ties(graph, boxes)), loss)


def is_shown(node: Node) -> bool:
    """Whether an operator is more than a view, and no local conversion of a parameter."""
    return is_tensor(node) and not _is_view(node) and not _is_folded_conversion(node)


def origin(node: Node) -> Node:
    """The shown operator or the placeholder that `node` is a view of."""
    while node.op == "call_function" and not is_shown(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def layer_of(node: Node) -> str:
    """The module path up to its first number (`transformer.h.3`), "" outside of layers."""
    match = re.match(r"(?:.*?\.)??\d+(?=\.|$)", note(node).module)
    return match[0] if match else ""


def _is_view(node: Node) -> bool:
    return op_name(node).removeprefix("aten.") in VIEWS


def _is_folded_conversion(node: Node) -> bool:
    """A conversion of a parameter that moves nothing: told in the label of its reader."""
    if node.target not in (markers.convert, markers.share) or note(node).conversion in COMMUNICATES:
        return False
    return origin(node.all_input_nodes[0]).op == "placeholder"


def _received(stage: int, body: list[Node]) -> list[Node]:
    """Values of earlier stages that the operators of a stage read."""
    read = dict.fromkeys(arg for node in body for arg in node.all_input_nodes if arg.op == "call_function")
    return [arg for arg in read if stage not in note(arg).stages]


def _stage_boxes(stage: int, body: list[Node], seen: dict[Any, str]) -> list[Box]:
    """The boxes of the operators of one stage; `seen` maps signatures of layers to the layers already shown."""
    shown = [node for node in body if is_shown(node)]
    of_layer: dict[str, list[Node]] = {}
    for node in shown:
        of_layer.setdefault(layer_of(node), []).append(node)
    of_layer.pop("", None)
    position = {node: i for i, node in enumerate(shown)}
    like: dict[str, str] = {}
    for layer, nodes in of_layer.items():
        is_one_piece = position[nodes[-1]] - position[nodes[0]] == len(nodes) - 1
        if len(nodes) > 2 and is_one_piece:
            first = seen.setdefault(_signature(layer, body, nodes), layer)
            if first != layer:
                like[layer] = first
    boxes: list[Box] = []
    for node in shown:
        _add(boxes, node, stage, like, of_layer)
    return boxes


def _add(boxes: list[Box], node: Node, stage: int, like: dict[str, str], of_layer: dict[str, list[Node]]) -> None:
    """Put `node` into a box: that of its folded layer, the last one if both are small and of one module, or its own."""
    layer, module = layer_of(node), note(node).module
    if layer in like:
        at = next((i for i, box in enumerate(boxes) if layer in box.folded), None)
        if at is None and boxes and boxes[-1].folded:
            at = len(boxes) - 1
        if at is None:
            boxes.append(_folded_box(stage, [layer], (node,), like))
        else:
            box = boxes[at]
            boxes[at] = _folded_box(stage, [*box.folded, layer], (*box.nodes, node), like)
        return
    if len(of_layer.get(layer, ())) <= 2:
        layer = ""
    inner = module.removeprefix(layer).removeprefix(".") if layer else ""
    part = inner.partition(".")[0]
    before = boxes[-1] if boxes else None
    if before and not before.folded and _can_join(before.nodes[-1], node):
        nodes = (*before.nodes, node)
        boxes[-1] = Box(before.id, stage, layer, part, _title(nodes, layer, part), nodes, _params(nodes))
    else:
        title = _title((node,), layer, part)
        boxes.append(Box(f"s{stage}_{node.name}", stage, layer, part, title, (node,), _params((node,))))


def _folded_box(stage: int, layers: Iterable[str], nodes: tuple[Node, ...], like: dict[str, str]) -> Box:
    layers = list(dict.fromkeys(layers))
    models = tuple(dict.fromkeys(like[one] for one in layers))
    title = f"{short(layers[0])} ... {short(layers[-1])}" if len(layers) > 1 else short(layers[0])
    title += f": as {', '.join(map(short, models))}" + (" in turn" if len(models) > 1 else "")
    return Box(f"s{stage}_{nodes[0].name}", stage, "", "", title, nodes, (), tuple(layers), models)


def short(module: str) -> str:
    """`h.3` for `transformer.h.3`: the last two names of a layer."""
    return ".".join(module.split(".")[-2:])


def _can_join(before: Node, node: Node) -> bool:
    """Small operators of one module that follow each other share a box: no cycle can come of it."""
    names = {op_name(one).removeprefix("aten.") for one in (before, node)}
    same = note(before).module == note(node).module and note(before).of_params == note(node).of_params
    return same and bool(note(node).module) and not names & ALONE and note(before).tp.kind == note(node).tp.kind


def _title(nodes: tuple[Node, ...], layer: str, part: str) -> str:
    """`c_attn: linear`; the whole module path outside of layers."""
    names = list(dict.fromkeys(op_name(one).removeprefix("aten.") for one in nodes))
    what = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
    module = note(nodes[-1]).module
    if layer:
        module = module.removeprefix(layer).removeprefix(".")
        module = module.removeprefix(f"{part}.")
    return what if module in ("", what) else f"{module}: {what}"


def _params(nodes: tuple[Node, ...]) -> tuple[tuple[str, Node, Node | None], ...]:
    found: dict[Node, tuple[str, Node, Node | None]] = {}
    for node in nodes:
        for arg in node.all_input_nodes:
            source = origin(arg)
            if note(source).kind in ("param", "buffer"):
                name = note(source).name
                own = name.removeprefix(note(node).module + ".")
                conversion = arg if note(arg).conversion else None
                found.setdefault(source, (own if own.count(".") == 0 else name, source, conversion))
    return tuple(found.values())


def _edges(boxes: list[Box], home: dict[tuple[int, Node], str]) -> list[Edge]:
    found: dict[tuple[str, str], Edge] = {}
    for box in boxes:
        if box.is_received:
            value = box.nodes[0]
            source = home[note(value).stages[0], origin(value)]
            found[source, box.id] = Edge(source, box.id, value, crosses=True)
            continue
        for arg in (arg for node in box.nodes if not box.is_input for arg in node.all_input_nodes):
            given = _given(arg, box.stage, home)
            if given not in (None, box.id):
                found.setdefault((given, box.id), Edge(given, box.id, arg))
    return list(found.values())


def _given(arg: Node, stage: int, home: dict[tuple[int, Node], str]) -> str | None:
    """The box of `stage` that gives an operand, through its views; None for parameters."""
    while (stage, arg) not in home and arg.op == "call_function" and arg.all_input_nodes:
        arg = arg.all_input_nodes[0]
    return home.get((stage, arg))


def _ties(graph: Graph, boxes: list[Box]) -> list[Tie]:
    """One tie between each two neighbours among the readers of a parameter."""
    readers: dict[Node, dict[str, None]] = {}
    for box in boxes:
        for _, param, _ in box.params or (_params(box.nodes) if box.folded else ()):
            if note(param).kind == "param":
                readers.setdefault(param, {})[box.id] = None
    ties = []
    for param in graph.nodes:
        chain = list(readers.get(param, ()))
        ties += [Tie(a, b, param) for a, b in pairwise(chain)]
    return ties


def _signature(layer: str, body: list[Node], shown: list[Node]) -> Any:
    """What the picture tells of a layer, without names: equal signatures can be drawn as one."""
    inside = {node: i for i, node in enumerate(node for node in body if layer_of(node) == layer)}

    def operand(arg: Any) -> Any:
        if not isinstance(arg, Node):
            return arg
        if arg in inside:
            return f"#{inside[arg]}"
        record = note(arg)
        own = record.name.removeprefix(f"{layer}.")
        kind = "value" if record.kind in ("op", "input") else record.kind
        return f"{kind} {own if own != record.name else ''} {record.tp}"

    told = []
    for node in inside:
        record = note(node)
        literals = str(map_aggregate((node.args, node.kwargs), operand))
        local = record.module.removeprefix(layer)
        told.append((str(node.target), literals, local, record.tp, str(record.extra.get("local_shapes"))))
    return (tuple(told), len(shown))
