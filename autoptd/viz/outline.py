"""Reduce the graph of a program to what a picture should show: boxes, edges, and layers that are like an
earlier one.

In: a `Program` with its LOCAL graph. Out: an `Outline` of plain records, in graph order.

box        one operator, conversion or input of one column; or a run of small operators of one module; or
folded layers. column     a stage; or several stages in a row that hold nothing but folded layers, drawn as
one. folded     layers with the operators, shapes and types of earlier ones: "h.1 ... h.5, 5 x h.0".

Every collective of the program is in one box, edge, tie or column (`calls`), or in `outline.others`.

    drawn = outline(program)
    drawn.boxes[0].title                # "idx"
    [edge for edge in drawn.edges if edge.crosses]
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise

from torch.fx import Node

from autoptd.ir import markers
from autoptd.ir.notes import note, ops, output
from autoptd.ir.operators.table import operator_of
from autoptd.program.program import Program
from autoptd.program.specs import Collective
from autoptd.viz.alike import Like, Shown, layer_of, pieces_of
from autoptd.viz.node_calls import Calls, calls_of_nodes
from autoptd.viz.views import hidden_inputs, is_shown, origin

# Of more stages, those that hold nothing but folded layers are drawn as one column.
STAGES_APART = 6
# Name in the operator's module, placeholder, conversion or None.
Param = tuple[str, Node, Node | None]


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
        return self.id.startswith("from_")

    @property
    def sent_to(self) -> int:
        """The stage that a value goes to, in the picture of one stage alone; else -1."""
        return int(self.id.split("_")[1][1:]) if self.id.startswith("to_") else -1


@dataclass(frozen=True)
class Column:
    """The stages `stages`, consecutive.

    `calls` are what they do once a step, and what they send each other.
    """

    stages: tuple[int, ...]
    calls: tuple[Collective, ...] = ()


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


@dataclass(frozen=True)
class Tie:
    """Boxes `first` and `second` read the same parameter."""

    first: str
    second: str
    param: Node
    calls: tuple[Collective, ...] = ()


@dataclass(frozen=True)
class Outline:
    """All there is to draw; `loss` is the id of the box that makes the result."""

    columns: tuple[Column, ...]
    boxes: tuple[Box, ...]
    edges: tuple[Edge, ...]
    ties: tuple[Tie, ...]
    loss: str
    others: tuple[Collective, ...] = ()


def outline(program: Program, *, folds: bool = True, stage: int | None = None) -> Outline:
    """Return what there is to draw.

    `folds`: layers like an earlier one as one box; of `stage` alone, if it is given.
    """
    graph = program.graphs["LOCAL"]
    made, left = calls_of_nodes(program)
    # Shared by all stages: a layer is drawn in full once in the picture.
    shown = Shown()
    stages = range(len(program.stages)) if stage is None else [stage]
    bodies: dict[int, list[Node]] = {k: [] for k in stages}
    for node in ops(graph):
        for k in bodies.keys() & note(node).stages:
            bodies[k].append(node)
    likes = {k: _find_likes(body, shown) if folds else {} for k, body in bodies.items()}
    columns = _columns(bodies, likes)
    boxes: list[Box] = []
    for i, column in enumerate(columns):
        boxes += _column_boxes(program, i, column, bodies, likes, made)
    # The box of every node, by stage: a value that is computed again stands on several.
    home = {(k, node): box.id for box in boxes for k in columns[box.column] for node in box.nodes}
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
    )
    return _place_calls(drawn, left)


def _find_likes(body: Sequence[Node], shown: Shown) -> dict[str, Like]:
    """Return the layers of a stage that equal earlier ones."""
    pieces = pieces_of([node for node in body if is_shown(node)])
    likes = {}
    for layer, piece in pieces.items():
        like = shown.find(piece)
        if like is not None:
            likes[layer] = like
    return likes


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
    adder = _Adder(index, stages, boxes, made)
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


@dataclass
class _Adder:
    """Puts the shown operators of a column into boxes, in order."""

    column: int
    stages: tuple[int, ...]
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
        for maker in (*hidden_inputs(node), node):
            before.calls += self.made.pop((maker, stage), ())

    def _new(self, node: Node) -> Box:
        self.boxes.append(Box(f"s{self.stages[0]}_{node.name}", self.column, "", "", []))
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
        source = origin(arg)
        if note(source).kind in ("param", "buffer"):
            name = note(source).name
            own = name.removeprefix(note(node).module + ".")
            conversion = arg if note(arg).conversion else None
            found.setdefault(source, (own if "." not in own else name, source, conversion))
    return tuple(found.values())


def _edges(boxes: list[Box], columns: list[tuple[int, ...]], home: dict[tuple[int, Node], str]) -> list[Edge]:
    edges: dict[tuple[str, str], Edge] = {}
    for box in boxes:
        stage = columns[box.column][0]
        if box.is_received:
            value = box.nodes[0]
            source = home.get((note(value).stages[0], origin(value)))
            if source:
                edges[source, box.id] = Edge(source, box.id, value, crosses=True)
            continue
        if box.sent_to >= 0:
            source = home.get((stage, origin(box.nodes[0])))
            if source:
                edges[source, box.id] = Edge(source, box.id, box.nodes[0], crosses=True)
            continue
        if box.is_input:
            continue
        for arg in chain.from_iterable(node.all_input_nodes for node in box.nodes):
            given = _given(arg, stage, home)
            if given is not None and given != box.id:
                edges.setdefault((given, box.id), Edge(given, box.id, arg))
    return list(edges.values())


def _given(arg: Node, stage: int, home: dict[tuple[int, Node], str]) -> str | None:
    """Return the box of a column that gives an operand, through its views; None for parameters."""
    while (stage, arg) not in home and arg.op == "call_function" and arg.all_input_nodes:
        arg = arg.all_input_nodes[0]
    return home.get((stage, arg))


def _ties(program: Program, boxes: list[Box]) -> Iterator[Tie]:
    """Yield a tie between each two neighbours among the readers of a parameter."""
    readers: dict[Node, dict[str, None]] = {}
    for box in boxes:
        for _, param, _ in box.params:
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


__all__ = ["Box", "Column", "Edge", "Outline", "Tie", "outline"]
