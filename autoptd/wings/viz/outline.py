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
    [edge for edge in drawn.edges if edge.crosses]
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from torch.fx import Node

from autoptd.ir.notes import note, ops, output
from autoptd.program.program import Program
from autoptd.program.specs import Collective
from autoptd.wings.viz.alike import Like, layer_of
from autoptd.wings.viz.boxes import Box, BoxAdder, Edge, Home, inner_edges
from autoptd.wings.viz.node_calls import Calls, calls_of_nodes
from autoptd.wings.viz.samples import Sample, draw_sample, find_repeats
from autoptd.wings.viz.views import is_shown, origin

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


__all__ = ["Box", "Column", "Edge", "Outline", "Tie", "outline"]
