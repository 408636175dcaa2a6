"""The picture of the operators: one of each distinct layer (level `layer`), or all of them (level `full`),
stage by stage.

In: a `Program` with its LOCAL graph. Out: a `Scene`: a frame for each stage, read top to bottom, and one for
each layer that is drawn apart. The colour of a link is the type of its value over tp, with the letter where
it begins.

    scene = layer_scene(program, folds=True)"""

from __future__ import annotations

import math
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from torch.fx import Node

from autoptd.ir.notes import note, tensor
from autoptd.ir.operators.table import operator_of
from autoptd.ir.types import CONVERSIONS, Conversion, type_text
from autoptd.program.program import Program
from autoptd.wings.viz import colours
from autoptd.wings.viz.colours import bars, call_lines
from autoptd.wings.viz.outline import (
    COLLECTIVES,
    Box,
    Column,
    Edge,
    Like,
    Outline,
    Sample,
    Tie,
    origin,
    outline,
    short_op,
)
from autoptd.wings.viz.scene import Frame, Item, Line, Link, Scene, line
from autoptd.wings.words import bytes_text, count_text, letter, plural


def layer_scene(
    program: Program, *, folds: bool = True, stage: int | None = None, work: Work | None = None
) -> Scene:
    """Return the picture.

    `folds`: layers like an earlier one as one box; `stage`: this one only; `work` for the tooltips.
    """
    return _Painter(program, outline(program, folds=folds, stage=stage), work).scene()


class _Painter:
    """Turns the parts of an outline into those of a scene."""

    def __init__(self, program: Program, drawn: Outline, work: Work | None) -> None:
        self.program, self.drawn = program, drawn
        self.is_split = program.mesh.t > 1
        # Samples have links, parts and a legend like stages: most of the painter need not tell them apart.
        self.all_boxes = list(drawn.boxes)
        for sample in drawn.samples:
            self.all_boxes += sample.boxes
        self.column_of = {box.id: box.column for box in self.all_boxes}
        self.place = {box.id: i for i, box in enumerate(self.all_boxes)}
        # One stage alone was asked for, of a program with several.
        self.is_alone = len(drawn.columns) == len(drawn.columns[0].stages) == 1 < len(program.stages)
        # A frame around a single box would say its name twice.
        parts = Counter((box.column, box.layer, box.part) for box in self.all_boxes)
        self.framed = {key for key, count in parts.items() if key[2] and count > 1}
        self.text = BoxText(self.is_split, self.framed, work)
        self.items = BoxItems(program, drawn, self.text, self.is_alone)

    def scene(self) -> Scene:
        title, subtitle = colours.heading(self.program)
        drawn = self.drawn
        frames = tuple(self._column(i, column) for i, column in enumerate(drawn.columns))
        samples = tuple(map(self._sample, drawn.samples))
        links = [*map(self._tie, drawn.ties), *map(self._edge, drawn.edges)]
        for sample in drawn.samples:
            links += map(self._edge, sample.edges)
        if drawn.loss:
            links.append(Link(drawn.loss, "result", weight=4))
        # The box of the result shows the sum of the loss.
        others = tuple(call for call in drawn.others if call.conversion != "loss sum" or not drawn.loss)
        # The boxes of a stage alone show what it sends and receives.
        if self.is_alone:
            others = tuple(call for call in others if call.scope != "microbatch")
        notes = tuple(f"Beside what is drawn: {bar.text}." for bar in bars(others))
        legend = self._legend(links)
        return Scene(
            title, subtitle, frames, tuple(links), legend, notes=notes, calls=others, samples=samples
        )

    # columns and frames

    def _column(self, index: int, column: Column) -> Frame:
        """Return the frame of a stage, or of several that are drawn as one."""
        boxes = [box for box in self.drawn.boxes if box.column == index]
        inside: list[Item | Frame] = []
        # Layers that are drawn here have no like, or every operator was asked for.
        for layer in dict.fromkeys(box.layer for box in boxes):
            of_layer = [box for box in boxes if box.layer == layer]
            inside += self._layer(layer, of_layer) if layer else map(self.items.item, of_layer)
        if self.drawn.loss and self.column_of[self.drawn.loss] == index:
            inside.append(self.items.result())
        stages = column.stages
        # The ground of a stage tells its pipeline rank; several have none in common.
        fill = colours.SEVERAL
        if len(stages) == 1:
            fill = colours.RANKS[self.program.rank_of_stage(stages[0]) % len(colours.RANKS)]
        tooltip = "\n".join(call_lines(column.calls))
        return Frame(
            f"stage_{stages[0]}",
            self._heading(column),
            tuple(inside),
            fill,
            colours.BORDER,
            tooltip,
            column.calls,
        )

    def _heading(self, column: Column) -> tuple[Line, ...]:
        program, stages = self.program, column.stages
        shares = colours.work_shares(program)
        share = sum(shares[k] for k in stages)
        sizes = [colours.param_count(program, k) for k in stages]
        if len(stages) > 1:
            name, remark = f"stages {stages[0]} ... {stages[-1]}", "  nothing but layers drawn apart"
        else:
            rank, chunk = program.rank_of_stage(stages[0]), program.chunk_of_stage(stages[0])
            name, remark = f"stage {stages[0]}", f"  pipeline rank {rank}, model chunk {chunk}"
        params = count_text(min(sizes))
        if min(sizes) < max(sizes):
            params += f" to {count_text(max(sizes))}"
        first = line((name, "bold"), (remark, "quiet"))
        second = line(f"{params} parameters on each rank, {share:.0f} % of all FLOPs")
        return (first, second, *(line((bar.text, "quiet")) for bar in bars(column.calls)))

    def _layer(self, layer: str, boxes: list[Box]) -> Iterator[Item | Frame]:
        """Yield the frame of a layer with frames of its parts; the boxes alone where these are few."""
        # A part of a layer that a cut left may be one or two operators.
        if len(boxes) < 3:
            yield from map(self.items.item, boxes)
            return
        inside = tuple(self._parts(boxes))
        yield Frame(f"{boxes[0].id}_layer", (line((layer, "bold")),), inside, colours.PART, colours.BORDER)

    def _parts(self, boxes: Sequence[Box]) -> Iterator[Item | Frame]:
        """Yield what is in a layer: a frame for each part of several boxes, and the other boxes alone."""
        for part in dict.fromkeys(box.part for box in boxes):
            of_part = [box for box in boxes if box.part == part]
            items = tuple(map(self.items.item, of_part))
            if (of_part[0].column, of_part[0].layer, part) in self.framed:
                title = (line((part, "bold")),)
                yield Frame(f"{of_part[0].id}_part", title, items, colours.PART, colours.PART_BORDER)
            else:
                yield from items

    def _sample(self, sample: Sample) -> Frame:
        """Return the frame of a layer that is drawn apart.

        Its boxes name collectives that the folded boxes of the stages stand for already.
        """
        own = [box for box in sample.boxes if not box.is_received]
        inside = tuple(map(_without_calls, self._parts(own)))
        # First, so that graphviz puts what a layer reads at the top.
        outer = tuple(self.items.outer(box) for box in sample.boxes if box.is_received)
        count = plural(len(sample.layers), "layer")
        where = (
            f"  drawn once: {range_text(sample.layers)} are alike, {count} in {_stages_text(sample.stages)}"
        )
        if len(sample.layers) == 1:
            where = f"  in stage {sample.stages[0]}, and parts of it in others"
        title = (line((sample.layer, "bold"), (where, "quiet")),)
        return Frame(
            f"layer_{self.place[sample.boxes[0].id]}", title, (*outer, *inside), colours.APART, colours.BORDER
        )

    # links

    def _edge(self, edge: Edge) -> Link:
        value, record = edge.value, note(edge.value)
        kind = record.layout.letter if self.is_split else "I"
        size = f"{self.text.shape(value)}, {bytes_text(local_bytes(value))} on each rank"
        tooltip = f"{note(origin(value)).module or 'model'}: {size}"
        if edge.crosses and self.is_alone:
            return Link(edge.source, edge.target, colours.SENT, 3.0, tooltip=tooltip, weight=2)
        if edge.crosses:
            tooltip = "\n".join([tooltip, *call_lines(edge.calls)])
            # What is sent is told where it is received.
            return Link(
                edge.source, edge.target, colours.SENT, 3.0, tooltip=tooltip, weight=2, calls=edge.calls
            )
        # Boxes are in the order of the graph.
        gap = self.place[edge.target] - self.place[edge.source]
        return Link(
            edge.source,
            edge.target,
            colours.EDGES[kind],
            width=1.4 if kind in "IR" else 1.8,
            dashed=kind == "P",
            letter=kind if self.is_split else "",
            tooltip=tooltip,
            # Neighbours in order stand below each other; residual links give way to them.
            weight=40 if gap == 1 else 1,
        )

    def _tie(self, tie: Tie) -> Link:
        name = note(tie.param).name
        return colours.tie_link(tie.first, tie.second, name, f"{name} is read by both", tie.calls)

    def _legend(self, links: Sequence[Link]) -> tuple[Item, ...]:
        """Return samples of what is in this picture, and of nothing else."""
        operators: list[Box] = []
        conversions: list[Box] = []
        for box in self.all_boxes:
            if not (box.is_input or box.is_received or box.folded or box.sent_to >= 0):
                group = conversions if note(box.nodes[-1]).conversion else operators
                group.append(box)
        fills = {self.text.split(box.nodes[-1], box)[1] for box in operators}
        legend = [sample for sample in colours.LEGEND_OF_SPLITS if sample.fill in fills]
        if any(box.folded for box in self.all_boxes):
            legend.append(colours.sample("layers drawn apart, once", colours.FOLDED, shape="stack"))
        if any(link.width > 2 for link in links):
            legend.append(colours.sample("sent to another stage", border=colours.SENT, thick=2.0))
        if self.drawn.ties:
            legend.append(colours.sample("one parameter, read by several", border=colours.TIED, dashed=True))
        if not self.is_split:
            return tuple(legend)
        if not all(map(collectives_of, conversions)):
            legend.append(colours.sample("type changes without communication", dashed=True))
        calls = [call for box in self.all_boxes for call in box.calls]
        legend += colours.legend_of_kinds(calls)
        if any(letter(note(box.nodes[-1]).conversion) for box in conversions):
            megatron = line(("f, g", "bold"), "  Megatron-LM's names of I to R and P to I")
            legend.append(Item("", (megatron,)))
        return (*legend, *colours.legend_of_types({link.letter for link in links}, self._shard()))

    def _shard(self) -> str:
        """Return a sharded type of this picture that says most, to explain how it is written."""
        found = []
        for box in self.all_boxes:
            found += re.findall(r"S\(dim \d+: .*\)", self.text.shape(box.nodes[-1]))
        return max(found, key=len, default="")


def _without_calls(part: Item | Frame) -> Item | Frame:
    if isinstance(part, Frame):
        return replace(part, inside=tuple(map(_without_calls, part.inside)))
    return replace(part, calls=())


def _stages_text(stages: Sequence[int]) -> str:
    """Name consecutive or other stages: `stage 0`, `stages 0 and 1`, `stages 0 to 7`."""
    if len(stages) == 1:
        return f"stage {stages[0]}"
    if len(stages) == 2:
        return f"stages {stages[0]} and {stages[1]}"
    if stages[-1] - stages[0] == len(stages) - 1:
        return f"stages {stages[0]} to {stages[-1]}"
    return f"{len(stages)} stages"


# Letters of a reason in one line: a longer one would make its box wider than those of the operators.
REASON_LETTERS = 34


class BoxItems:
    """`is_alone`: one stage of several is drawn, so that what it sends has boxes."""

    def __init__(self, program: Program, drawn: Outline, text: BoxText, is_alone: bool) -> None:
        self.program, self.drawn, self.text, self.is_alone = program, drawn, text, is_alone
        # A value that crosses has one box where it arrives, so that the box names what carries it.
        self.sends = {edge.target: edge.calls for edge in drawn.edges if edge.crosses}

    def item(self, box: Box) -> Item:
        """Return the item of a box in a stage."""
        node = box.nodes[-1]
        if box.is_input:
            kind = str(tensor(node).dtype).removeprefix("torch.")
            lines = (line((note(node).name, "bold"), (" input", "quiet")), line(f"{shape_text(node)} {kind}"))
            return Item(box.id, lines, colours.INPUT, shape="note", tooltip=self.text.tooltip(box))
        if box.is_received:
            return self._received(box)
        if box.sent_to >= 0:
            below = line(self.text.shape(node)), line(self.text.traffic(node))
            return self._at_border(box, (line((f"to stage {box.sent_to}", "bold")), *below))
        if box.folded:
            return self._folded(box)
        if note(node).conversion:
            return self._conversion(box)
        return self._operator(box)

    def outer(self, box: Box) -> Item:
        """Return the item of a value that a layer drawn apart reads of the rest of the model."""
        node = box.nodes[0]
        what = short_op(node) if node.op == "call_function" else note(node).name
        if len(box.nodes) > 1:
            what = f"{len(box.nodes)} values"
        where = f" of {note(node).module}" if note(node).module else " of the model"
        first = line(("input", "bold"), (" of the layer", "quiet"))
        # The residual stream carries a gradient; masks and rotary tables, which all layers share, do not.
        if not note(node).needs_grad:
            first = line((what, "bold"), (where, "quiet"))
        lines = (first, line(self.text.shape(node)))
        return Item(box.id, lines, colours.INPUT, shape="note", tooltip=self.text.tooltip(box))

    def _received(self, box: Box) -> Item:
        node = box.nodes[0]
        stage, here = note(node).stages[0], self.drawn.columns[box.column].stages
        passed = ""
        if here[0] - stage == 2:
            passed = f", passing by stage {stage + 1}"
        elif here[0] - stage > 2:
            passed = f", passing by stages {stage + 1} to {here[0] - 1}"
        made = origin(node)
        what = f"{short_op(made)} of {note(made).module or 'the model'}"
        lines = [line((f"from stage {stage}", "bold"), (passed, "quiet")), line((what, "quiet"))]
        lines.append(line(self.text.shape(node)))
        calls = self.sends.get(box.id, ())
        if calls:
            lines += bars(calls)
        elif self.is_alone:
            lines.append(line(self.text.traffic(node)))
        else:
            lines.append(line((f"{bytes_text(local_bytes(node))} of the same message", "quiet")))
        return self._at_border(box, lines)

    def _at_border(self, box: Box, lines: Sequence[Line]) -> Item:
        """Return the item of a value that enters or leaves a stage."""
        return Item(
            box.id, tuple(lines), colours.RECEIVED, colours.SENT, thick=1.6, tooltip=self.text.tooltip(box)
        )

    def _folded(self, box: Box) -> Item:
        layers = list(box.folded)
        equal = likeness(list(box.folded.values()))
        # Layers may share a parameter: each is counted once.
        params = sum(math.prod(note(param).local.shapes[0]) for _, param, _ in dict.fromkeys(box.params))
        lines = [line((range_text(layers), "bold")), *(line(text) for text in equal)]
        if params:
            count = len(self.drawn.columns[box.column].stages)
            where = "on each rank" if count == 1 else f"on the {count} stages together"
            lines.append(line((f"{count_text(params)} parameters {where}", "quiet")))
        lines += bars(box.calls)
        calls = tuple(box.calls)
        tooltip = "\n".join([f"{'; '.join(equal)}: drawn apart, once", *call_lines(calls)])
        return Item(box.id, tuple(lines), colours.FOLDED, shape="stack", tooltip=tooltip, calls=calls)

    def _conversion(self, box: Box) -> Item:
        node = box.nodes[-1]
        record, row = note(node), conversion_of(node)
        # The name of a conversion is for code; people read its two types.
        pair = next(f"{a} to {b}" for (a, b), other in CONVERSIONS.items() if other is row)
        title = f"{letter(row.name)}: {pair}" if letter(row.name) else pair
        lines = [line((title, "bold"), (f"  over {self.program.mesh.t} ranks of tp", "quiet"))]
        kinds = collectives_of(box)
        for phase, kind in zip(("forward", "backward"), work_of(box), strict=True):
            if kind in COLLECTIVES:
                sizes = [call.payload_bytes for call in box.calls if kind in (call.forward, call.backward)]
                size = f", {bytes_text(sizes[0])}" if sizes else ""
                lines.append(line(f"{phase}: {kind}{size}", bar=colours.KINDS[kind]))
            # Beside a collective, the direction in which nothing is done needs no line.
            elif kind != "none" or not kinds:
                lines.append(line((f"{phase}: {'nothing' if kind == 'none' else kind}", "quiet")))
        again = [call for call in box.calls if call.conversion == "gathered again"]
        lines += [line(bar.text + " again", bar=bar.bar) for bar in bars(again)]
        reason = record.why.partition(": ")[2] or record.why
        lines += [line((text, "quiet")) for text in textwrap.wrap(reason, REASON_LETTERS)]
        lines += self.text.params(box)
        color, thick = (colours.KINDS[kinds[0]], 2.0) if kinds else (colours.BORDER, 1.0)
        return Item(
            box.id,
            tuple(lines),
            border=color,
            thick=thick,
            dashed=not kinds,
            tooltip=self.text.tooltip(box),
            calls=tuple(box.calls),
        )

    def _operator(self, box: Box) -> Item:
        node = box.nodes[-1]
        name, what = self.text.title(box)
        # The last operator of a run gives its box the shape and the colour: it makes what is read outside.
        how, fill = self.text.split(node, box)
        if is_sum(box):
            lines = [line(("+ ", "bold"), what), line((self.text.shape(node), "quiet"))]
        else:
            # Without a module of its own, an operator's name is the heading.
            lines = [line((name, "bold"), (" " if name else ""), (what, "quiet" if name else "bold"))]
            if how:
                lines.append(line(how))
            lines += [line(self.text.shape(node)), *self.text.params(box)]
        # Vocabulary-parallel look-ups and losses communicate inside of one operator.
        summed = [call for call in box.calls if call.forward in COLLECTIVES or call.backward in COLLECTIVES]
        lines += bars(summed)
        # The all-reduce of a GEMM with a hook is hidden behind its second GEMM.
        if note(node).gemm.absorbed is not None:
            lines.append(line(("while the weight's gradient is computed", "quiet")))
        return Item(
            box.id,
            tuple(lines),
            fill,
            border=colours.KINDS["all-reduce"] if summed else colours.BORDER,
            shape="pill" if is_sum(box) else "box",
            thick=2.0 if summed else 1.0,
            tooltip=self.text.tooltip(box),
            calls=tuple(box.calls),
        )

    def result(self) -> Item:
        """Return the item of the loss, which is summed over microbatches."""
        over = "microbatches and dp" if self.program.mesh.d > 1 else "microbatches"
        calls = tuple(call for call in self.drawn.others if call.conversion == "loss sum")
        lines = (line(("loss", "bold"), (f" summed over {over}", "quiet")), *bars(calls))
        return Item("result", lines, shape="pill", tooltip="\n".join(call_lines(calls)), calls=calls)


# FLOPs of a node on one rank, forward and backward.
Work = Callable[[Node], tuple[int, int]]


@dataclass(frozen=True)
class BoxText:
    """`is_split`: several tensor ranks.

    `framed`: (column, layer, part) that have a frame; `work` for the tooltips.
    """

    is_split: bool
    framed: set[tuple[int, str, str]]
    work: Work | None = None

    def title(self, box: Box) -> tuple[str, str]:
        """Return (module, operators) of a box: `c_attn`, `linear`.

        Outside of layers the whole module path.
        """
        # Repeats in a run of small operators say nothing new.
        names = list(dict.fromkeys(map(short_op, box.nodes)))
        what = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
        module = note(box.nodes[-1]).module
        if box.layer:
            module = module.removeprefix(box.layer).removeprefix(".")
            if (box.column, box.layer, box.part) in self.framed:
                module = "" if module == box.part else module.removeprefix(f"{box.part}.")
        return ("" if module == what else module), what

    def split(self, node: Node, box: Box) -> tuple[str, str]:
        """Return how an operator is split, in words and as a colour."""
        record = note(node)
        kind = record.layout.over("tp").letter
        if not self.is_split:
            return "", colours.SMALL
        # The solver's reason alone tells this split from other shards of rows.
        if "vocabulary" in record.why and record.why.startswith("split by"):
            return "split by vocabulary", colours.VOCABULARY
        if operator_of(node).factors:
            # A bias follows its matrix: only what has two dims tells how a product is split.
            matrices = [made or param for _, param, made in box.params if len(tensor(param).shape) > 1]
            weights = [note(matrix).layout.over("tp").letter for matrix in matrices]
            if kind == "P":
                return "row split: each rank sums over its inputs", colours.ROW
            if kind == "S" and "S" in weights:
                return "column split: each rank has its outputs", colours.COLUMN
            if kind != "S":
                return "whole on every rank", colours.WHOLE
        return "", colours.SPLIT if kind == "S" else colours.SMALL

    def params(self, box: Box) -> list[Line]:
        """Return parameters of an operator, and what is done on the way: `weight [96, 64] S(dim 0: 3 x [4] x
        16)`.
        """
        rows: dict[str, list[str]] = {}
        for name, node, conversion in box.params:
            done = ""
            # A conversion that communicates has a box of its own, and is shown there.
            if conversion is not None and conversion not in box.nodes and note(conversion).conversion:
                done = f", {conversion_of(conversion).forward}"
            rows.setdefault(f"{self.shape(node)}{done}", []).append(name)
        return [line((f"{', '.join(names)} {text}", "quiet")) for text, names in rows.items()]

    def traffic(self, node: Node) -> str:
        """Say what a value that crosses amounts to: `384 KiB, and its gradient back`."""
        gradient = "and its gradient" if note(node).needs_grad else "no gradient"
        return f"{bytes_text(local_bytes(node))}, {gradient} back"

    def shape(self, node: Node) -> str:
        """Return shape and type: `[1, 128, 1152] S(dim 2: 3 x [12] x 64)`; no type where nothing is split."""
        if not self.is_split:
            return shape_text(node)
        record = note(node)
        # Over tp alone, which is then the only axis that cuts, it is not named.
        kind = record.layout.text(record.dims)
        if all(axis == "tp" for axis, _ in record.layout.over_mesh):
            kind = type_text(record.layout["tp"], record.dims, "tp").replace("S(tp, ", "S(")
        return f"{shape_text(node)}  {kind}"

    def tooltip(self, box: Box) -> str:
        """Say where a box comes from, its line of code, why it is as it is, and what it costs."""
        node = box.nodes[-1]
        record = note(node)
        where = record.module or record.name
        if record.source:
            where = f"{record.module or 'model'} ({record.source})"
        size = shape_text(node)
        if record.local.traced is not None:
            size += f" of {list(record.local.traced)} traced"
        dtype = str(tensor(node).dtype).removeprefix("torch.")
        lines = [where, record.code, f"why: {record.why}" if record.why else "", record.stages_why]
        lines.append(f"{size} {dtype}: {bytes_text(local_bytes(node))} on each rank")
        # Inputs and received values are made elsewhere, and counted there.
        if self.work and not box.is_input and not box.is_received:
            forward, backward = (sum(counts) for counts in zip(*map(self.work, box.nodes), strict=True))
            if forward:
                both = f"{count_text(forward)} FLOPs forward, {count_text(backward)} backward"
                lines.append(f"{both} on each rank")
        return "\n".join(text for text in (*lines, *call_lines(box.calls)) if text)


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
