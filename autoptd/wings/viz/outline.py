"""Reduce the graph of a program to what a picture should show: boxes, edges, and layers that repeat.

In: a `Program` with its LOCAL graph. Out: an `Outline` of plain records, in graph order.

| word | is |
|---|---|
| box | an operator, conversion or input of a column; a run of small operators of a module; folded layers |
| column | a stage; or several stages in a row that hold nothing but folded layers, drawn as one |
| folded | layers with the same operators, shapes and types: "h.0 ... h.5, 6 layers like h.0" |
| sample | one of such layers, operator by operator, drawn apart from the stages |

Every collective of the program is in one box, edge, tie or column (`calls`), or in `outline.others`; samples
show those of their layer once more.

    drawn = outline(program)
    drawn.boxes[0].title                # "idx"
    [edge for edge in drawn.edges if edge.crosses]"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from typing import Any

from torch.fx import Node
from torch.fx.node import map_aggregate

from autoptd.ir import markers
from autoptd.ir.notes import is_tensor, note, op_name, ops, output
from autoptd.ir.operators.table import operator_of
from autoptd.ir.types import CONVERSIONS
from autoptd.program.program import Program
from autoptd.program.specs import Collective

# Of more stages, those that hold nothing but folded layers are drawn as one column.
STAGES_APART = 6


@dataclass(frozen=True)
class Column:
    """The stages `stages`, consecutive.

    `calls` are what they do once a step, and what they send each other.
    """

    stages: tuple[int, ...]
    calls: tuple[Collective, ...] = ()


@dataclass(frozen=True)
class Tie:
    """Boxes `first` and `second` read the same parameter."""

    first: str
    second: str
    param: Node
    calls: tuple[Collective, ...] = ()


@dataclass(frozen=True)
class Outline:
    """All there is to draw; `loss` is the id of the box that makes the result.

    `samples` are the layers that folded boxes stand for.
    """

    columns: tuple[Column, ...]
    boxes: tuple[Box, ...]
    edges: tuple[Edge, ...]
    ties: tuple[Tie, ...]
    loss: str
    others: tuple[Collective, ...] = ()
    samples: tuple[Sample, ...] = ()


def outline(program: Program, *, folds: bool = True, stage: int | None = None) -> Outline:
    """Return what there is to draw.

    `folds`: layers like an earlier one as one box; of `stage` alone, if it is given.
    """
    graph = program.graphs["LOCAL"]
    made, left = calls_of_nodes(program)
    stages = range(len(program.stages)) if stage is None else [stage]
    bodies: dict[int, list[Node]] = {k: [] for k in stages}
    for node in ops(graph):
        # A value that is cheaper to compute again than to send stands in several stages.
        for k in bodies.keys() & note(node).stages:
            bodies[k].append(node)
    likes, apart = find_repeats(bodies) if folds else ({k: {} for k in bodies}, [])
    samples = [draw_sample(i, stage, piece, likes, made) for i, (stage, piece) in enumerate(apart)]
    # After layers are folded: what is left of a stage decides whether it needs a column.
    columns = _columns(bodies, likes)
    boxes: list[Box] = []
    for i, column in enumerate(columns):
        boxes += _column_boxes(program, i, column, bodies, likes, made)
    # The box of every node, by stage: a value that is computed again stands on several.
    home: Home = {(k, node): box.id for box in boxes for k in columns[box.column] for node in box.nodes}
    if stage is not None:
        # A stage alone: boxes stand for the stages that read what it sends.
        boxes += [Box(f"to_s{k}_{value.name}", 0, "", "", [value]) for k, value in _sent(program, stage)]
    edges = _edges(boxes, columns, home)
    ties = _ties(program, boxes)
    loss = output(graph).args[0]
    assert isinstance(loss, Node)
    drawn = Outline(
        tuple(Column(column) for column in columns),
        tuple(boxes),
        tuple(edges),
        tuple(ties),
        home.get((program.loss_stage, origin(loss)), ""),
        samples=tuple(samples),
    )
    return _place_calls(drawn, left)


def _columns(bodies: dict[int, list[Node]], likes: dict[int, dict[str, Like]]) -> list[tuple[int, ...]]:
    """Return the stages of each column: where there are many, those in a row that only repeat earlier
    layers share one.
    """
    columns: list[list[int]] = []
    was_plain = False
    for stage, body in bodies.items():
        # Folded operators and those that an earlier stage shows already are nothing new.
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
    likes: dict[int, dict[str, Like]],
    made: Calls,
) -> list[Box]:
    """Return the boxes of a column: values received from earlier columns, inputs, operators."""
    received: dict[Node, None] = {}
    for stage in stages:
        for value in _received(stage, bodies[stage]):
            # What stages of one column send each other stays within it.
            if note(value).stages[0] not in stages:
                received[value] = None
    boxes = [Box(f"from_s{stages[0]}_{node.name}", index, "", "", [node]) for node in received]
    for node in program.graphs["LOCAL"].nodes:
        if note(node).kind == "input" and set(stages) & set(note(node).stages):
            boxes.append(Box(f"s{stages[0]}_{node.name}", index, "", "", [node]))
    adder = BoxAdder(index, f"s{stages[0]}", boxes, made)
    for stage in stages:
        for node in bodies[stage]:
            if is_shown(node) and (len(stages) == 1 or layer_of(node) in likes[stage]):
                adder.add(node, stage, likes[stage])
    return boxes


def _received(stage: int, body: list[Node]) -> list[Node]:
    """Return values of earlier stages that the operators of a stage read."""
    read = dict.fromkeys(arg for node in body for arg in node.all_input_nodes if arg.op == "call_function")
    return [arg for arg in read if stage not in note(arg).stages]


def _sent(program: Program, stage: int) -> list[tuple[int, Node]]:
    """Return (stage that reads it, value) of everything that a stage sends."""
    # A dict in place of a set: in the order of the graph.
    sent: dict[tuple[int, Node], None] = {}
    for node in ops(program.graphs["LOCAL"]):
        if stage in note(node).stages:
            continue
        for arg in node.all_input_nodes:
            # The first of the stages that compute a value sends it to those that do not.
            if arg.op == "call_function" and note(arg).stages[0] == stage:
                sent |= dict.fromkeys((k, arg) for k in note(node).stages if k not in note(arg).stages)
    return sorted(sent, key=lambda pair: pair[0])


def _edges(boxes: list[Box], columns: list[tuple[int, ...]], home: Home) -> list[Edge]:
    edges: list[Edge] = []
    for box in boxes:
        stage = columns[box.column][0]
        if box.is_received or box.sent_to >= 0:
            value = box.nodes[0]
            maker = note(value).stages[0] if box.is_received else stage
            source = home.get((maker, origin(value)))
            if source:
                edges.append(Edge(source, box.id, value, crosses=True))
        elif not box.is_input:
            edges += inner_edges([box], stage, home)
    return edges


def _ties(program: Program, boxes: list[Box]) -> Iterator[Tie]:
    """Yield a tie between each two neighbours among the readers of a parameter."""
    readers: dict[Node, dict[str, None]] = {}
    for box in boxes:
        for _, param, _ in box.params:
            # A buffer has no gradient that would have to be summed.
            if note(param).kind == "param":
                readers.setdefault(param, {})[box.id] = None
    for param in program.graphs["LOCAL"].nodes:
        for first, second in pairwise(readers.get(param, ())):
            yield Tie(first, second, param)


def _place_calls(drawn: Outline, left: list[Collective]) -> Outline:
    """Give what no node communicates to edges between columns, to ties, and to columns."""
    column_of = {stage: i for i, column in enumerate(drawn.columns) for stage in column.stages}
    boxes = {box.id: box for box in drawn.boxes}
    # The records are frozen: each that gets a call is replaced.
    edges, ties, columns = list(drawn.edges), list(drawn.ties), list(drawn.columns)
    links: dict[tuple[int, int], int] = {}
    for i, edge in enumerate(edges):
        if edge.crosses:
            links.setdefault((boxes[edge.source].column, boxes[edge.target].column), i)
    others = []
    for call in left:
        # Messages between stages have a site of their own; everything else names a module or a parameter.
        ends = re.fullmatch(r"stage (\d+) to (\d+)", call.site)
        at = column_of.get(call.stage)
        if ends:
            first, second = sorted(map(int, ends.groups()))
            link = (column_of.get(first, -1), column_of.get(second, -1))
            if link in links:
                edges[links[link]] = replace(edges[links[link]], calls=(*edges[links[link]].calls, call))
                continue
            at = column_of.get(min(first, second)) if link[0] == link[1] else None
        elif call.conversion == "tied sum":
            i = next((i for i, tie in enumerate(ties) if note(tie.param).name in call.site), None)
            if i is not None:
                ties[i] = replace(ties[i], calls=(*ties[i].calls, call))
                continue
        elif call.conversion == "loss sum":
            at = None
        if at is None:
            others.append(call)
        else:
            columns[at] = replace(columns[at], calls=(*columns[at].calls, call))
    return replace(drawn, columns=tuple(columns), edges=tuple(edges), ties=tuple(ties), others=tuple(others))


SHOWN_MOVES = ("", "part", "cast")  # what computes, takes a part of its operand, or changes its dtype
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")
COMMUNICATES = {row.name for row in CONVERSIONS.values() if {row.forward, row.backward} & set(COLLECTIVES)}


def short_op(node: Node) -> str:
    """Return `linear` for `aten.linear`."""
    return op_name(node).removeprefix("aten.")


def is_shown(node: Node) -> bool:
    """Tell whether an operator is drawn: neither a view nor a local conversion of a parameter."""
    return is_tensor(node) and operator_of(node).moves in SHOWN_MOVES and not _is_shown_by_reader(node)


def origin(node: Node) -> Node:
    """Return the shown operator or the placeholder that `node` is a view of."""
    # A view has one operand that is a tensor of its own: the first.
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
    # Of an activation, even a local change of type is drawn: it explains what comes next.
    return origin(node.all_input_nodes[0]).op == "placeholder"


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


Calls = dict[tuple[Node, int], tuple[Collective, ...]]


def calls_of_nodes(program: Program) -> tuple[Calls, list[Collective]]:
    """Return what each node communicates, by node and stage, and the rest.

    Several collectives may have one site (a loop in the model): they go to its nodes in graph order.
    """
    # Collectives are listed by site, nodes by graph: in a loop both come in the same order.
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
    """Return (site, conversion) of what a node may communicate, as the compiler names them."""
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


# Name in the operator's module, placeholder, conversion or None.
Param = tuple[str, Node, Node | None]
# The box of every node that is drawn, by (stage or number of the layer drawn apart, node).
Home = dict[tuple[int, Node], str]


@dataclass
class Box:
    """One thing to draw, in column `column`.

    `layer` and `part` (attn, mlp, ...) are the frames around it, "" for none.

    `nodes` are the operators it stands for; `folded` are the layers drawn as this one box, in order, and what
    each equals.
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
        """Whether it is a value of another stage, or of what comes before a layer that is drawn apart."""
        return self.id.startswith("from_")

    @property
    def sent_to(self) -> int:
        """The stage that a value goes to, in the picture of one stage alone; else -1."""
        return int(self.id.split("_")[1][1:]) if self.id.startswith("to_") else -1


@dataclass(frozen=True)
class Edge:
    """`value` flows from box `source` to box `target`.

    `crosses`: it is sent to another column, where a box receives it.
    """

    source: str
    target: str
    value: Node
    crosses: bool = False
    calls: tuple[Collective, ...] = ()


@dataclass
class BoxAdder:
    """Puts the shown operators of a column into boxes, in order; `made` are collectives not yet in one."""

    column: int
    prefix: str
    boxes: list[Box]
    made: Calls

    def add(self, node: Node, stage: int, likes: dict[str, Like]) -> None:
        """Put `node` into the box of its folded layer, into the last box if both are small and of one module,
        or its own.
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
        # A conversion of a parameter has no box: its reader shows what it communicates.
        for maker in (*hidden_inputs(node), node):
            before.calls += self.made.pop((maker, stage), ())

    def _new(self, node: Node) -> Box:
        self.boxes.append(Box(f"{self.prefix}_{node.name}", self.column, "", "", []))
        return self.boxes[-1]


def _can_join(before: Node, node: Node) -> bool:
    """Tell whether two operators that follow each other share a box: small ones of one module, so that no
    cycle arises.
    """
    is_small = before.op == node.op == "call_function" and not (_is_alone(before) or _is_alone(node))
    same = note(before).module == note(node).module and note(before).of_params == note(node).of_params
    return is_small and same and bool(note(node).module) and _kinds(before) == _kinds(node)


def _is_alone(node: Node) -> bool:
    """Tell whether an operator is never merged with its neighbours into one box: products, look-ups,
    losses, conversions.
    """
    record = operator_of(node)
    is_large = bool(record.factors or record.flops) or record.is_lookup or record.keeps == "probabilities"
    return is_large or node.target is markers.convert


def _kinds(node: Node) -> list[str]:
    return [kind.kind for _, kind in note(node).layout.over_mesh]


def _params(node: Node) -> tuple[Param, ...]:
    found: dict[Node, Param] = {}
    for arg in node.all_input_nodes:
        # Through views and conversions: the reader of a transposed weight still reads that weight.
        source = origin(arg)
        if note(source).kind in ("param", "buffer"):
            name = note(source).name
            own = name.removeprefix(note(node).module + ".")
            conversion = arg if note(arg).conversion else None
            found.setdefault(source, (own if "." not in own else name, source, conversion))
    return tuple(found.values())


def given_by(arg: Node, place: int, home: Home) -> str | None:
    """Return the box that gives an operand in a stage or a layer, through its views; None for parameters."""
    while (place, arg) not in home and arg.op == "call_function" and arg.all_input_nodes:
        arg = arg.all_input_nodes[0]
    return home.get((place, arg))


def inner_edges(boxes: list[Box], place: int, home: Home) -> list[Edge]:
    """Return what flows between boxes of operators of one stage or layer; one edge for each two boxes."""
    edges: dict[tuple[str, str], Edge] = {}
    for box in boxes:
        operands: list[Node] = []
        for node in box.nodes:
            operands += node.all_input_nodes
        for arg in operands:
            source = given_by(arg, place, home)
            if source is not None and source != box.id:
                # Several values between two boxes are one arrow, or a fused q, k, v would be three.
                edges.setdefault((source, box.id), Edge(source, box.id, arg))
    return list(edges.values())


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
