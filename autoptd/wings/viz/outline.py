"""Reduce the graph of a program to the contents of a picture: boxes, edges, and layers that repeat.

In: a `Program` with its LOCAL graph. Out: an `Outline` of plain records, in graph order.

| word | meaning |
|---|---|
| view | an operator that only rearranges (view, transpose, split, ...): not shown, edges pass through it |
| box | an operator, conversion or input of a column; a run of small operators of a module; folded layers |
| column | a stage; or several stages in a row that contain only folded layers, drawn as one |
| layer | a module path up to its first number: `transformer.h.3` |
| piece | the operators of one layer in one stage, if no others are between them |
| folded | layers with the same operators, shapes and types: "h.0 ... h.5, 6 layers like h.0" |
| sample | one of such layers, operator by operator, drawn apart from the stages |

Every collective of the program is in one box or column (`calls`), or in `outline.others`; samples repeat those of
their layer.

    drawn = outline(program)
    [box.id for box in drawn.boxes if box.folded]
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from torch.fx import Node
from torch.fx.node import map_aggregate

from autoptd.ir import markers
from autoptd.ir.notes import is_tensor, note, op_name, ops, output
from autoptd.ir.operators.table import operator_of
from autoptd.ir.types import CONVERSIONS
from autoptd.program.program import Program
from autoptd.program.specs import Collective

# With more stages, those that contain only folded layers share a column.
STAGES_APART = 6
# A shorter piece is drawn in full: a box that names what it equals would take as much room.
MIN_FOLDED_OPERATORS = 3
# Operators that are shown: they compute, take a part of their operand, or change its dtype.
SHOWN_MOVES = ("", "part", "cast")
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")
COMMUNICATES = {row.name for row in CONVERSIONS.values() if {row.forward, row.backward} & set(COLLECTIVES)}

# Name in the operator's module, placeholder, conversion or None.
Param = tuple[str, Node, Node | None]
# The box of every node that is drawn, by (stage or number of the sample, node).
Home = dict[tuple[int, Node], str]
# The collectives of every node in a stage.
Calls = dict[tuple[Node, int], tuple[Collective, ...]]


@dataclass(frozen=True)
class Like:
    """The layer that a piece equals; `part` names the part of it ("" for all of it)."""

    layer: str
    part: str = ""


# The layers that those of every stage equal, by stage and layer.
Likes = dict[int, dict[str, Like]]


@dataclass
class Box:
    """One thing to draw, in column `column`, with the frames `layer` and `part` (attn, mlp, ...) around it.

    `nodes` are the operators it stands for; `folded` are the layers drawn as this one box, in order, with the layers
    that they equal.
    """

    id: str
    column: int
    layer: str
    part: str
    nodes: list[Node]
    params: tuple[Param, ...] = ()
    folded: dict[str, Like] = field(default_factory=dict)
    calls: list[Collective] = field(default_factory=list)

    @property
    def is_input(self) -> bool:
        return self.nodes[0].op == "placeholder"

    @property
    def is_received(self) -> bool:
        """Whether it is a value from another stage, or from the model before a sample."""
        return self.id.startswith("from_")

    @property
    def sent_to(self) -> int:
        """The stage that a value goes to, else -1."""
        return int(self.id.split("_")[1][1:]) if self.id.startswith("to_") else -1


@dataclass(frozen=True)
class Edge:
    """`value` flows from box `source` to box `target`, in one column."""

    source: str
    target: str
    value: Node


@dataclass(frozen=True)
class Column:
    """The consecutive stages `stages`; `calls` are those of the step, and messages between these stages."""

    stages: tuple[int, ...]
    calls: tuple[Collective, ...] = ()


@dataclass(frozen=True)
class Sample:
    """One layer of several that are alike: `layers` are the whole ones, itself included, in order."""

    layer: str
    layers: tuple[str, ...]
    stages: tuple[int, ...]
    boxes: tuple[Box, ...]
    edges: tuple[Edge, ...]


@dataclass(frozen=True)
class Outline:
    """The contents of a picture; `loss` is the id of the box that makes the result.

    `ties` are the boxes that read the same parameter, by parameter; `samples` the layers that folded boxes stand for.
    """

    columns: tuple[Column, ...]
    boxes: tuple[Box, ...]
    edges: tuple[Edge, ...]
    ties: Mapping[Node, tuple[Box, ...]]
    loss: str
    others: tuple[Collective, ...] = ()
    samples: tuple[Sample, ...] = ()


def outline(program: Program, *, folds: bool = True, stage: int | None = None) -> Outline:
    """Return the contents of a picture, of one `stage` if given; `folds`: a layer like an earlier one is folded."""
    graph = program.graphs["LOCAL"]
    made, left = calls_of_nodes(program)
    stages = range(len(program.stages)) if stage is None else [stage]
    bodies: dict[int, list[Node]] = {k: [] for k in stages}
    for node in ops(graph):
        # A value that is cheaper to recompute than to send is in several stages.
        for k in bodies.keys() & note(node).stages:
            bodies[k].append(node)
    likes, apart = find_repeats(bodies) if folds else ({k: {} for k in bodies}, [])
    samples = [draw_sample(i, stage, piece, likes, made) for i, (stage, piece) in enumerate(apart)]
    columns = _columns(bodies, likes)
    boxes: list[Box] = []
    for i, column in enumerate(columns):
        boxes += _column_boxes(program, i, column, bodies, likes, made)
    home: Home = {}
    for box in boxes:
        if box.sent_to < 0:
            home |= {(k, node): box.id for k in columns[box.column] for node in box.nodes}
    edges: list[Edge] = []
    for box in boxes:
        place = columns[box.column][0]
        if box.sent_to >= 0:
            # The first stage that computes a value sends it.
            source = home.get((note(box.nodes[0]).stages[0], origin(box.nodes[0])))
            edges += [Edge(source, box.id, box.nodes[0])] if source else []
        elif not (box.is_input or box.is_received):
            edges += inner_edges([box], place, home)
    loss = output(graph).args[0]
    assert isinstance(loss, Node)
    drawn = Outline(
        tuple(Column(column) for column in columns),
        tuple(boxes),
        tuple(edges),
        _ties(boxes),
        home.get((program.loss_stage, origin(loss)), ""),
        samples=tuple(samples),
    )
    return _place_calls(drawn, left)


def _columns(bodies: dict[int, list[Node]], likes: Likes) -> list[tuple[int, ...]]:
    """Return the stages of each column: of many, those in a row that only repeat earlier layers share one."""
    columns: list[list[int]] = []
    was_plain = False
    for stage, body in bodies.items():
        # Not folded, and not in an earlier stage either.
        drawn = [node for node in body if is_shown(node)]
        new = [node for node in drawn if layer_of(node) not in likes[stage] and note(node).stages[0] >= stage]
        is_plain = len(bodies) > STAGES_APART and not new
        if is_plain and was_plain:
            columns[-1].append(stage)
        else:
            columns.append([stage])
        was_plain = is_plain
    return [tuple(column) for column in columns]


def _column_boxes(
    program: Program,
    index: int,
    stages: tuple[int, ...],
    bodies: dict[int, list[Node]],
    likes: Likes,
    made: Calls,
) -> list[Box]:
    """Return the boxes of a column: received values, inputs, operators, sent values."""
    received: dict[Node, None] = {}
    for stage in stages:
        for node in bodies[stage]:
            for arg in node.all_input_nodes:
                # Messages between the stages of a column stay within it.
                is_here = stage in note(arg).stages or note(arg).stages[0] in stages
                if arg.op == "call_function" and not is_here:
                    received[arg] = None
    boxes = [Box(f"from_s{stages[0]}_{node.name}", index, "", "", [node]) for node in received]
    for node in program.graphs["LOCAL"].nodes:
        if note(node).kind == "input" and set(stages) & set(note(node).stages):
            boxes.append(Box(f"s{stages[0]}_{node.name}", index, "", "", [node]))
    adder = BoxAdder(index, f"s{stages[0]}", boxes, made)
    for stage in stages:
        for node in bodies[stage]:
            if is_shown(node) and (len(stages) == 1 or layer_of(node) in likes[stage]):
                adder.add(node, stage, likes[stage])
    for k, value in _sent(program, stages):
        boxes.append(Box(f"to_s{k}_{value.name}", index, "", "", [value]))
    return boxes


def _sent(program: Program, stages: tuple[int, ...]) -> list[tuple[int, Node]]:
    """Return (stage that reads it, value) of everything that a column sends."""
    # A dict instead of a set, in the order of the graph.
    sent: dict[tuple[int, Node], None] = {}
    for node in ops(program.graphs["LOCAL"]):
        for arg in node.all_input_nodes:
            # The first stage that computes a value sends it to those that do not.
            if arg.op == "call_function" and note(arg).stages[0] in stages:
                readers = set(note(node).stages).difference(note(arg).stages, stages)
                sent |= dict.fromkeys((k, arg) for k in sorted(readers))
    return sorted(sent, key=lambda pair: pair[0])


def _ties(boxes: list[Box]) -> dict[Node, tuple[Box, ...]]:
    """Return the boxes of every parameter that several boxes read."""
    readers: dict[Node, dict[str, Box]] = {}
    for box in boxes:
        for _, param, _ in box.params:
            # Buffers have no gradient to sum.
            if note(param).kind == "param":
                readers.setdefault(param, {})[box.id] = box
    return {param: tuple(found.values()) for param, found in readers.items() if len(found) > 1}


def _place_calls(drawn: Outline, left: list[Collective]) -> Outline:
    """Add the collectives that no node makes to boxes of received or sent values, and to columns."""
    column_of = {stage: i for i, column in enumerate(drawn.columns) for stage in column.stages}
    columns = list(drawn.columns)
    others = []
    for call in left:
        # Messages between stages have a special site; all others name a module or a parameter.
        ends = re.fullmatch(r"stage (\d+) to (\d+)", call.site)
        at = column_of.get(call.stage)
        if ends:
            first, second = sorted(map(int, ends.groups()))
            box = _end(drawn, column_of, first, second)
            if box is not None:
                box.calls.append(call)
                continue
            at = column_of.get(first) if column_of.get(first) == column_of.get(second) else None
        elif call.conversion == "loss sum":
            at = None
        if at is None:
            others.append(call)
        else:
            columns[at] = replace(columns[at], calls=(*columns[at].calls, call))
    return replace(drawn, columns=tuple(columns), others=tuple(others))


def _end(drawn: Outline, column_of: Mapping[int, int], first: int, second: int) -> Box | None:
    """Return the box that shows a message: where it arrives, or if that stage is not drawn where it is sent."""
    for box in drawn.boxes:
        maker = note(box.nodes[0]).stages[:1]
        if box.is_received and column_of.get(second) == box.column and maker == (first,):
            return box
    for box in drawn.boxes:
        if box.sent_to == second and second not in column_of and column_of.get(first) == box.column:
            return box
    return None


# boxes


@dataclass
class BoxAdder:
    """Puts the shown operators of a column into boxes, in order; `made` are collectives not yet in one."""

    column: int
    prefix: str
    boxes: list[Box]
    made: Calls

    def add(self, node: Node, stage: int, likes: dict[str, Like]) -> None:
        """Put `node` into the box of its folded layer, into the last box if both are small and of one module,
        or into its own.
        """
        layer = layer_of(node)
        before = self.boxes[-1] if self.boxes else None
        if layer in likes:
            if before is None or not before.folded:
                before = self._new(node)
            # One box stands for all folded layers in a row.
            before.folded.setdefault(layer, likes[layer])
            before.nodes.append(node)
            before.params += _params(node)
        elif before and not before.folded and _can_join(before.nodes[-1], node):
            before.nodes.append(node)
            known = before.params
            before.params += tuple(param for param in _params(node) if param not in known)
        else:
            before = self._new(node)
            inner = note(node).module.removeprefix(layer).removeprefix(".") if layer else ""
            before.layer, before.part = layer, inner.partition(".")[0]
            before.nodes.append(node)
            before.params = _params(node)
        # A conversion of a parameter has no box: its reader shows its collective.
        for maker in (*hidden_inputs(node), node):
            before.calls += self.made.pop((maker, stage), ())

    def _new(self, node: Node) -> Box:
        self.boxes.append(Box(f"{self.prefix}_{node.name}", self.column, "", "", []))
        return self.boxes[-1]


def _can_join(before: Node, node: Node) -> bool:
    """Tell whether two operators in a row share a box: small ones of one module, so that no cycle arises."""
    is_small = before.op == node.op == "call_function" and not (_is_alone(before) or _is_alone(node))
    same = note(before).module == note(node).module and note(before).of_params == note(node).of_params
    return is_small and same and bool(note(node).module) and _kinds(before) == _kinds(node)


def _is_alone(node: Node) -> bool:
    """Tell whether an operator always has its own box: products, look-ups, losses, conversions."""
    record = operator_of(node)
    is_large = bool(record.factors or record.flops) or record.is_lookup or record.keeps == "probabilities"
    return is_large or node.target is markers.convert


def _kinds(node: Node) -> list[str]:
    return [kind.kind for _, kind in note(node).layout.over_mesh]


def _params(node: Node) -> tuple[Param, ...]:
    found: dict[Node, Param] = {}
    for arg in node.all_input_nodes:
        # Through views and conversions: the reader of a transposed weight reads that weight.
        source = origin(arg)
        if note(source).kind in ("param", "buffer"):
            name = note(source).name
            own = name.removeprefix(note(node).module + ".")
            conversion = arg if note(arg).conversion else None
            found.setdefault(source, (own if "." not in own else name, source, conversion))
    return tuple(found.values())


def inner_edges(boxes: Sequence[Box], place: int, home: Home) -> list[Edge]:
    """Return the edges between boxes of one stage or sample: one for each two boxes."""
    edges: dict[tuple[str, str], Edge] = {}
    for box in boxes:
        for arg in chain.from_iterable(node.all_input_nodes for node in box.nodes):
            source = _given_by(arg, place, home)
            if source is not None and source != box.id:
                # Several values, such as q, k and v of a fused product, are one arrow.
                edges.setdefault((source, box.id), Edge(source, box.id, arg))
    return list(edges.values())


def _given_by(arg: Node, place: int, home: Home) -> str | None:
    """Return the box of an operand in a stage or sample, through views; None for parameters."""
    while (place, arg) not in home and arg.op == "call_function" and arg.all_input_nodes:
        arg = arg.all_input_nodes[0]
    return home.get((place, arg))


# layers that repeat


@dataclass(frozen=True)
class Piece:
    """The operators `nodes` of `layer` in one stage, in order."""

    layer: str
    nodes: tuple[Node, ...]


def find_repeats(bodies: Mapping[int, list[Node]]) -> tuple[Likes, list[tuple[int, Piece]]]:
    """Return the layers that repeated layers equal, and the first of each kind with its stage.

    Layers are equal if their operators, shapes, types over tp and wiring are; names of layers, numbers of dropout sites
    and floats are not compared. A cut may go through a layer: then its parts are compared with whole layers.
    """
    likes: Likes = {stage: {} for stage in bodies}
    first: list[tuple[int, Piece]] = []
    wholes: dict[Hashable, str] = {}
    rows: dict[str, list[Hashable]] = {}
    for stage, body in bodies.items():
        for piece in pieces_of([node for node in body if is_shown(node)]):
            whole, row = _wiring(piece), [_operator(node, piece.layer) for node in piece.nodes]
            # By operators alone, since the inputs of a part differ from those of a whole layer.
            like = Like(wholes[whole]) if whole in wholes else _part_of(row, rows)
            if like is not None:
                likes[stage][piece.layer] = like
                continue
            first.append((stage, piece))
            wholes[whole] = piece.layer
            rows.setdefault(piece.layer, row)
    repeated = {like.layer for found in likes.values() for like in found.values()}
    apart = [(stage, piece) for stage, piece in first if piece.layer in repeated]
    # The first of a kind is folded, too: the stages show all layers in the same way.
    for stage, piece in apart:
        likes[stage][piece.layer] = Like(piece.layer)
    return likes, apart


def pieces_of(body: Sequence[Node]) -> list[Piece]:
    """Return the pieces of a stage's shown operators; a layer that other operators interrupt has none."""
    nodes: dict[str, list[Node]] = {}
    for node in body:
        nodes.setdefault(layer_of(node), []).append(node)
    # Operators outside of layers never repeat.
    nodes.pop("", None)
    place = {node: i for i, node in enumerate(body)}
    pieces = []
    for layer, row in nodes.items():
        is_unbroken = place[row[-1]] - place[row[0]] == len(row) - 1
        if is_unbroken and len(row) >= MIN_FOLDED_OPERATORS:
            pieces.append(Piece(layer, tuple(row)))
    return pieces


def layer_of(node: Node) -> str:
    """Return the module path up to its first number (`transformer.h.3`), "" outside of layers."""
    match = re.match(r"(?:.*?\.)??\d+(?=\.|$)", note(node).module)
    return match[0] if match else ""


def _part_of(row: list[Hashable], rows: Mapping[str, list[Hashable]]) -> Like | None:
    """Return the layer that contains these operators, and which part of it they are; None if there is none."""
    count = len(row)
    for layer, other in rows.items():
        for start in range(len(other) - count + 1):
            # Slices are expensive, and most starts differ in their first operator.
            if other[start] == row[0] and other[start : start + count] == row:
                where = "last" if start + count == len(other) else "middle"
                where = "first" if start == 0 else where
                return Like(layer, f"{where} {count} of {len(other)} operators")
    return None


def _operator(node: Node, layer: str) -> Hashable:
    """Return what a picture shows of an operator, without names."""
    record = note(node)
    args: tuple[Any, ...] = node.args
    # Each dropout has its own number, as a keyword or as the third argument.
    keywords = {key: arg for key, arg in node.kwargs.items() if key != "site"}
    if node.target in (markers.dropout, markers.noise):
        args = (*args[:2], *args[3:])
    # Not floats either: some models scale attention by the number of the layer.
    literals = map_aggregate((args, keywords), lambda arg: "." if isinstance(arg, (Node, float)) else arg)
    local = record.module.removeprefix(layer)
    shapes = str(record.local.shapes)
    return str(node.target), str(literals), local, record.layout, shapes, record.conversion


def _wiring(piece: Piece) -> Hashable:
    """Return all operators of a piece, and the operands of each."""
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


def draw_sample(number: int, stage: int, piece: Piece, likes: Likes, made: Calls) -> Sample:
    """Return the boxes of one layer; `number` counts the samples of a picture."""
    # Columns of stages count up from 0, samples down from -1.
    place = -1 - number
    # A copy of the collectives: the box in the stage has them as well.
    adder = BoxAdder(place, f"layer{number}", [], dict(made))
    for node in piece.nodes:
        adder.add(node, stage, {})
    outer = [Box(f"from_layer{number}_{values[0].name}", place, "", "", values) for values in _outer(piece)]
    home: Home = {}
    for box in (*outer, *adder.boxes):
        home |= dict.fromkeys(((place, node) for node in box.nodes), box.id)
    # Without parts of layers.
    same = [(k, layer) for k, found in likes.items() for layer in found if found[layer] == Like(piece.layer)]
    layers = sorted(dict.fromkeys(layer for _, layer in same), key=_number)
    stages = tuple(dict.fromkeys(k for k, _ in same))
    edges = inner_edges(adder.boxes, place, home)
    return Sample(piece.layer, tuple(layers), stages, (*outer, *adder.boxes), tuple(edges))


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
    # The layer's input comes last, next to its first operator, so that their link is straight.
    return sorted(read.values(), key=lambda values: note(values[0]).needs_grad)


def _number(layer: str) -> tuple[str, int]:
    """Return a key that sorts `h.2` before `h.10`."""
    prefix, _, number = layer.rpartition(".")
    return prefix, int(number)


# collectives of nodes


def calls_of_nodes(program: Program) -> tuple[Calls, list[Collective]]:
    """Return the collectives of each node, by node and stage, and those that no node makes: messages between stages
    and sums of a step. Together they are `program.collectives`, each once.
    """
    # Several collectives may have one site (a loop in the model): both lists are in graph order.
    waiting: dict[tuple[str, int, str], deque[int]] = {}
    for i, call in enumerate(program.collectives):
        waiting.setdefault((call.site, call.stage, call.conversion), deque()).append(i)
    calls: Calls = {}
    for node in ops(program.graphs["LOCAL"]):
        for stage in note(node).stages:
            queues = [waiting.get((site, stage, conversion)) for site, conversion in _sites(node)]
            taken = [queue.popleft() for queue in queues if queue]
            if taken:
                calls[node, stage] = tuple(program.collectives[i] for i in taken)
    left = sorted(chain.from_iterable(waiting.values()))
    return calls, [program.collectives[i] for i in left]


def _sites(node: Node) -> list[tuple[str, str]]:
    """Return (site, conversion) of a node's collectives, as the compiler names them."""
    record = note(node)
    here = f"{record.module} ({record.source})"
    if record.conversion:
        # A value that is not kept for backward is gathered a second time, at the same site.
        again = [(here, "gathered again")] if record.gemm.uses is not None else []
        return [(here, record.conversion), *again]
    if record.gemm.absorbed is not None:
        return [(here, record.gemm.absorbed.conversion)]
    if node.target is markers.cross_entropy and node.kwargs["vocab"]:
        # A cross-entropy over a split vocabulary reduces twice within one operator.
        sites = (f"{record.module or 'model'} {what} ({record.source})" for what in ("maximum", "sums"))
        return [(site, "vocab_parallel_cross_entropy") for site in sites]
    if node.target in markers.OVER_CLASSES.values():
        words = ("maximum", "sum", "position", "gradients")
        return [(f"{record.module or 'model'} {what} ({record.source})", op_name(node)) for what in words]
    return []


# operators that are shown


def short_op(node: Node) -> str:
    """Return `linear` for `aten.linear`."""
    return op_name(node).removeprefix("aten.")


def is_shown(node: Node) -> bool:
    """Tell whether an operator is drawn: neither a view nor a local conversion of a parameter."""
    return is_tensor(node) and operator_of(node).moves in SHOWN_MOVES and not _is_shown_by_reader(node)


def origin(node: Node) -> Node:
    """Return the shown operator or the placeholder that `node` is a view of."""
    # The first operand of a view is its tensor.
    while node.op == "call_function" and not is_shown(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def hidden_inputs(node: Node) -> Iterator[Node]:
    """Yield the hidden operators between a shown one and the origins of its operands."""
    for arg in node.all_input_nodes:
        while arg.op == "call_function" and not is_shown(arg) and arg.all_input_nodes:
            yield arg
            arg = arg.all_input_nodes[0]


def _is_shown_by_reader(node: Node) -> bool:
    if node.target not in (markers.convert, markers.share) or note(node).conversion in COMMUNICATES:
        return False
    # Local conversions of activations are drawn, as they explain the types downstream.
    return origin(node.all_input_nodes[0]).op == "placeholder"
