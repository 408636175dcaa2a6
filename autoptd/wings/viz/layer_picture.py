"""Draw the operators: one of each distinct layer (level `layer`), or all of them (level `full`), stage by stage.

In: a `Program` with its LOCAL graph. Out: a `Scene`: a frame for each stage, read from top to bottom, and one for each
layer that is drawn apart. A stage begins with the values that it receives and ends with those that it sends; no link
leaves it. An operator is coloured by how it is split, a conversion that communicates has a bar for each direction, and
parameters are listed in the box of their operator. The colour of a link is the type of its value over tp, with the
letter where it begins.

    scene = layer_scene(program, folds=True)
"""

from __future__ import annotations

import math
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

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
    origin,
    outline,
    short_op,
)
from autoptd.wings.viz.scene import Frame, Item, Line, Link, Scene, line
from autoptd.wings.words import bytes_text, count_text, letter, plural

# FLOPs of a node on one rank, forward and backward.
Work = Callable[[Node], tuple[int, int]]
# Letters of a reason in one line: a longer one would make its box wider than those of the operators.
REASON_LETTERS = 34


def layer_scene(
    program: Program, *, folds: bool = True, stage: int | None = None, work: Work | None = None
) -> Scene:
    """Return the picture, of one `stage` if given.

    `folds`: layers like an earlier one are one box; `work`: FLOPs for the tooltips.
    """
    drawn = outline(program, folds=folds, stage=stage)
    # Samples have links, parts and a legend like stages.
    boxes = list(drawn.boxes)
    for sample in drawn.samples:
        boxes += sample.boxes
    # A frame around a single box would repeat its name.
    parts = Counter((box.column, box.layer, box.part) for box in boxes)
    framed = {key for key, count in parts.items() if key[2] and count > 1}
    items = _Items(program, drawn, framed, work)
    return _Painter(program, drawn, boxes, items).scene()


class _Painter:
    """Turns the parts of an outline into frames, links and a legend."""

    def __init__(self, program: Program, drawn: Outline, boxes: list[Box], items: _Items) -> None:
        self.program, self.drawn, self.boxes, self.items = program, drawn, boxes, items
        self.place = {box.id: i for i, box in enumerate(boxes)}

    def scene(self) -> Scene:
        title, subtitle = colours.heading(self.program)
        drawn = self.drawn
        frames = tuple(self._column(i, column) for i, column in enumerate(drawn.columns))
        samples = tuple(map(self._sample, drawn.samples))
        edges = [*drawn.edges, *(edge for sample in drawn.samples for edge in sample.edges)]
        links = [self._link(edge) for edge in edges]
        others = drawn.others
        if drawn.loss:
            links.append(Link(drawn.loss, "result", weight=4))
            # In the box of the result.
            others = tuple(call for call in others if call.conversion != "loss sum")
        # With a single stage, messages between other stages are not part of the picture.
        if sum(len(column.stages) for column in drawn.columns) < len(self.program.stages):
            others = tuple(call for call in others if call.scope != "microbatch")
        notes = tuple(f"Not in the picture: {bar.text}." for bar in bars(others))
        legend = self._legend(links)
        return Scene(
            title, subtitle, frames, tuple(links), legend, notes=notes, calls=others, samples=samples
        )

    def _column(self, index: int, column: Column) -> Frame:
        """Return the frame of a stage, or of several that are drawn as one."""
        boxes = [box for box in self.drawn.boxes if box.column == index]
        inside: list[Item | Frame] = []
        # Layers that are drawn here equal no other one, or every operator was requested.
        for layer in dict.fromkeys(box.layer for box in boxes):
            of_layer = [box for box in boxes if box.layer == layer]
            # A cut may leave one or two operators of a layer, which need no frame.
            if layer and len(of_layer) > 2:
                title = (line((layer, "bold")),)
                parts = tuple(self._parts(of_layer))
                inside.append(Frame(f"{of_layer[0].id}_layer", title, parts, colours.PART, colours.BORDER))
            else:
                inside += map(self.items.item, of_layer)
        if any(box.id == self.drawn.loss for box in boxes):
            inside.append(self.items.result())
        # The ground of a stage tells its pipeline rank.
        fill = colours.SEVERAL
        if len(column.stages) == 1:
            fill = colours.RANKS[self.program.rank_of_stage(column.stages[0]) % len(colours.RANKS)]
        tooltip = "\n".join(call_lines(column.calls))
        name = f"stage_{column.stages[0]}"
        return Frame(name, self._heading(column), tuple(inside), fill, colours.BORDER, tooltip, column.calls)

    def _heading(self, column: Column) -> tuple[Line, ...]:
        program, stages = self.program, column.stages
        shares = colours.work_shares(program)
        share = sum(shares[k] for k in stages)
        sizes = [colours.param_count(program, k) for k in stages]
        if len(stages) > 1:
            name, remark = f"stages {stages[0]} ... {stages[-1]}", "  only layers drawn apart"
        else:
            rank, chunk = program.rank_of_stage(stages[0]), program.chunk_of_stage(stages[0])
            name, remark = f"stage {stages[0]}", f"  pipeline rank {rank}, model chunk {chunk}"
        params = count_text(min(sizes))
        if min(sizes) < max(sizes):
            params += f" to {count_text(max(sizes))}"
        first = line((name, "bold"), (remark, "quiet"))
        second = line(f"{params} parameters on each rank, {share:.0f} % of all FLOPs")
        return (first, second, *(line((bar.text, "quiet")) for bar in bars(column.calls)))

    def _parts(self, boxes: Sequence[Box]) -> Iterator[Item | Frame]:
        """Yield the contents of a layer: a frame for each part of several boxes, and the other boxes."""
        for part in dict.fromkeys(box.part for box in boxes):
            of_part = [box for box in boxes if box.part == part]
            items = tuple(map(self.items.item, of_part))
            if (of_part[0].column, of_part[0].layer, part) in self.items.framed:
                title = (line((part, "bold")),)
                yield Frame(f"{of_part[0].id}_part", title, items, colours.PART, colours.PART_BORDER)
            else:
                yield from items

    def _sample(self, sample: Sample) -> Frame:
        """Return the frame of a layer that is drawn apart, without its collectives: folded boxes have them."""
        own = [box for box in sample.boxes if not box.is_received]
        # Inputs come first, so that graphviz puts them at the top.
        outer = (self.items.outer(box) for box in sample.boxes if box.is_received)
        inside = (*outer, *map(_without_calls, self._parts(own)))
        count = plural(len(sample.layers), "layer")
        where = (
            f"  drawn once: {range_text(sample.layers)} are alike, {count} in {_stages_text(sample.stages)}"
        )
        if len(sample.layers) == 1:
            where = f"  in stage {sample.stages[0]}, and parts of it in others"
        title = (line((sample.layer, "bold"), (where, "quiet")),)
        name = f"layer_{self.place[sample.boxes[0].id]}"
        return Frame(name, title, inside, colours.APART, colours.BORDER)

    def _link(self, edge: Edge) -> Link:
        value, record, items = edge.value, note(edge.value), self.items
        kind = record.layout.letter if items.is_split else "I"
        size = f"{items.shape(value)}, {bytes_text(local_bytes(value))} on each rank"
        return Link(
            edge.source,
            edge.target,
            colours.EDGES[kind],
            width=1.4 if kind in "IR" else 1.8,
            dashed=kind == "P",
            letter=kind if items.is_split else "",
            tooltip=f"{note(origin(value)).module or 'model'}: {size}",
            # Neighbours in graph order are aligned; residual links bend.
            weight=40 if self.place[edge.target] - self.place[edge.source] == 1 else 1,
        )

    def _legend(self, links: Sequence[Link]) -> tuple[Item, ...]:
        """Return samples of the parts of this picture."""
        operators: list[Box] = []
        conversions: list[Box] = []
        for box in self.boxes:
            if not (box.is_input or box.is_received or box.folded or box.sent_to >= 0):
                group = conversions if note(box.nodes[-1]).conversion else operators
                group.append(box)
        fills = {self.items.split(box.nodes[-1], box)[1] for box in operators}
        legend = [sample for sample in colours.LEGEND_OF_SPLITS if sample.fill in fills]
        if any(box.folded for box in self.boxes):
            legend.append(colours.sample("layers drawn apart, once", colours.FOLDED, shape="stack"))
        if any(box.sent_to >= 0 or box.is_received for box in self.drawn.boxes):
            legend.append(colours.sample("sent to another stage", border=colours.SENT, thick=2.0))
        if not self.items.is_split:
            return tuple(legend)
        if not all(map(collectives_of, conversions)):
            legend.append(colours.sample("type changes without communication", dashed=True))
        legend += colours.legend_of_kinds(call for box in self.boxes for call in box.calls)
        if any(letter(note(box.nodes[-1]).conversion) for box in conversions):
            megatron = line(("f, g", "bold"), "  Megatron-LM's names of I to R and P to I")
            legend.append(Item("", (megatron,)))
        # The longest sharded type explains most of the notation.
        shards = []
        for box in self.boxes:
            shards += re.findall(r"S\(dim \d+: .*\)", self.items.shape(box.nodes[-1]))
        letters = {link.letter for link in links}
        return (*legend, *colours.legend_of_types(letters, max(shards, key=len, default="")))


class _Items:
    """Turns boxes into items: their lines, colours and shapes.

    `framed`: (column, layer, part) that have a frame; `work`: FLOPs for the tooltips.
    """

    def __init__(
        self, program: Program, drawn: Outline, framed: set[tuple[int, str, str]], work: Work | None
    ) -> None:
        self.program, self.drawn, self.framed, self.work = program, drawn, framed, work
        self.is_split = program.mesh.t > 1

    def item(self, box: Box) -> Item:
        """Return the item of a box in a stage."""
        if box.is_input:
            return self._input(box)
        if box.is_received:
            return self._received(box)
        if box.sent_to >= 0:
            return self._sent(box)
        if box.folded:
            return self._folded(box)
        return self._conversion(box) if note(box.nodes[-1]).conversion else self._operator(box)

    def _input(self, box: Box) -> Item:
        node = box.nodes[-1]
        kind = str(tensor(node).dtype).removeprefix("torch.")
        lines = (line((note(node).name, "bold"), (" input", "quiet")), line(f"{shape_text(node)} {kind}"))
        return Item(box.id, lines, colours.INPUT, shape="note", tooltip=self._tooltip(box))

    def outer(self, box: Box) -> Item:
        """Return the item of a value that a layer drawn apart reads from the rest of the model."""
        node = box.nodes[0]
        what = short_op(node) if node.op == "call_function" else note(node).name
        if len(box.nodes) > 1:
            what = f"{len(box.nodes)} values"
        first = line((what, "bold"), (f" of {note(node).module or 'the model'}", "quiet"))
        # The residual stream has a gradient; masks and rotary tables, which all layers share, do not.
        if note(node).needs_grad:
            first = line(("input", "bold"), (" of the layer", "quiet"))
        lines = (first, line(self.shape(node)))
        return Item(box.id, lines, colours.INPUT, shape="note", tooltip=self._tooltip(box))

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
        lines.append(line(self.shape(node)))
        # The first of the values of a message names its collectives.
        same = line((f"{bytes_text(local_bytes(node))} of the same message", "quiet"))
        return self._at_border(box, [*lines, *(bars(box.calls) or [same])])

    def _sent(self, box: Box) -> Item:
        node = box.nodes[0]
        gradient = "and its gradient" if note(node).needs_grad else "no gradient"
        size = line((f"{bytes_text(local_bytes(node))}, {gradient} back", "quiet"))
        lines = [line((f"to stage {box.sent_to}", "bold")), line(self.shape(node))]
        return self._at_border(box, [*lines, *(bars(box.calls) or [size])])

    def _at_border(self, box: Box, lines: Sequence[Line]) -> Item:
        """Return the item of a value that enters or leaves a stage."""
        tooltip, calls = self._tooltip(box), tuple(box.calls)
        return Item(
            box.id, tuple(lines), colours.RECEIVED, colours.SENT, thick=1.6, tooltip=tooltip, calls=calls
        )

    def _folded(self, box: Box) -> Item:
        equal = likeness(list(box.folded.values()))
        # Layers may share parameters.
        params = sum(math.prod(note(param).local.shapes[0]) for _, param, _ in dict.fromkeys(box.params))
        lines = [line((range_text(list(box.folded)), "bold")), *map(line, equal)]
        if params:
            count = len(self.drawn.columns[box.column].stages)
            where = "on each rank" if count == 1 else f"on the {count} stages together"
            lines.append(line((f"{count_text(params)} parameters {where}", "quiet")))
        lines += [*self._ties(box), *bars(box.calls)]
        calls = tuple(box.calls)
        tooltip = "\n".join([f"{'; '.join(equal)}: drawn apart, once", *call_lines(calls)])
        return Item(box.id, tuple(lines), colours.FOLDED, shape="stack", tooltip=tooltip, calls=calls)

    def _conversion(self, box: Box) -> Item:
        record, row = note(box.nodes[-1]), conversion_of(box.nodes[-1])
        # The two types instead of the conversion's name in code.
        pair = next(f"{a} to {b}" for (a, b), other in CONVERSIONS.items() if other is row)
        title = f"{letter(row.name)}: {pair}" if letter(row.name) else pair
        lines = [line((title, "bold"), (f"  over {self.program.mesh.t} ranks of tp", "quiet"))]
        kinds = collectives_of(box)
        for phase, kind in zip(("forward", "backward"), work_of(box), strict=True):
            if kind in COLLECTIVES:
                sizes = [call.payload_bytes for call in box.calls if kind in (call.forward, call.backward)]
                size = f", {bytes_text(sizes[0])}" if sizes else ""
                lines.append(line(f"{phase}: {kind}{size}", bar=colours.KINDS[kind]))
            # If the other direction communicates, an idle one has no line.
            elif kind != "none" or not kinds:
                lines.append(line((f"{phase}: {'nothing' if kind == 'none' else kind}", "quiet")))
        again = [call for call in box.calls if call.conversion == "gathered again"]
        lines += [line(bar.text + " again", bar=bar.bar) for bar in bars(again)]
        reason = record.why.partition(": ")[2] or record.why
        lines += [line((text, "quiet")) for text in textwrap.wrap(reason, REASON_LETTERS)]
        lines += [*self._params(box), *self._ties(box)]
        color, thick = (colours.KINDS[kinds[0]], 2.0) if kinds else (colours.BORDER, 1.0)
        return Item(
            box.id,
            tuple(lines),
            border=color,
            thick=thick,
            dashed=not kinds,
            tooltip=self._tooltip(box),
            calls=tuple(box.calls),
        )

    def _operator(self, box: Box) -> Item:
        node = box.nodes[-1]
        name, what = self._title(box)
        # The last operator of a run determines shape and colour: others read its value.
        how, fill = self.split(node, box)
        if is_sum(box):
            lines = [line(("+ ", "bold"), what), line((self.shape(node), "quiet"))]
        else:
            # Without a module, an operator's name is the heading.
            lines = [line((name, "bold"), (" " if name else ""), (what, "quiet" if name else "bold"))]
            lines += [line(text) for text in (how, self.shape(node)) if text]
            lines += [*self._params(box), *self._ties(box)]
        # Vocabulary-parallel look-ups and losses communicate within one operator.
        summed = [call for call in box.calls if call.forward in COLLECTIVES or call.backward in COLLECTIVES]
        lines += bars(summed)
        # The all-reduce of a GEMM with a hook overlaps its second GEMM.
        if note(node).gemm.absorbed is not None:
            lines.append(line(("while the weight's gradient is computed", "quiet")))
        return Item(
            box.id,
            tuple(lines),
            fill,
            border=colours.KINDS["all-reduce"] if summed else colours.BORDER,
            shape="pill" if is_sum(box) else "box",
            thick=2.0 if summed else 1.0,
            tooltip=self._tooltip(box),
            calls=tuple(box.calls),
        )

    def result(self) -> Item:
        """Return the item of the loss, which is summed over microbatches."""
        over = "microbatches and dp" if self.program.mesh.d > 1 else "microbatches"
        calls = tuple(call for call in self.drawn.others if call.conversion == "loss sum")
        lines = (line(("loss", "bold"), (f" summed over {over}", "quiet")), *bars(calls))
        return Item("result", lines, shape="pill", tooltip="\n".join(call_lines(calls)), calls=calls)

    # lines

    def _title(self, box: Box) -> tuple[str, str]:
        """Return (module, operators) of a box: `c_attn`, `linear`; outside of layers the whole module path."""
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
        # Only the solver's reason distinguishes this from other shards of rows.
        if "vocabulary" in record.why and record.why.startswith("split by"):
            return "split by vocabulary", colours.VOCABULARY
        if operator_of(node).factors:
            # A bias follows its matrix.
            matrices = [made or param for _, param, made in box.params if len(tensor(param).shape) > 1]
            weights = [note(matrix).layout.over("tp").letter for matrix in matrices]
            if kind == "P":
                return "row split: each rank sums over its inputs", colours.ROW
            if kind == "S" and "S" in weights:
                return "column split: each rank has its outputs", colours.COLUMN
            if kind != "S":
                return "whole on every rank", colours.WHOLE
        return "", colours.SPLIT if kind == "S" else colours.SMALL

    def _params(self, box: Box) -> list[Line]:
        """Return the parameters of an operator with their local conversions: `weight [96, 64] S(dim 0: 3 x [4] x 16)`."""
        rows: dict[str, list[str]] = {}
        for name, node, conversion in box.params:
            done = ""
            # A conversion that communicates has its own box.
            if conversion is not None and conversion not in box.nodes and note(conversion).conversion:
                done = f", {conversion_of(conversion).forward}"
            rows.setdefault(f"{self.shape(node)}{done}", []).append(name)
        return [line((f"{', '.join(names)} {text}", "quiet")) for text, names in rows.items()]

    def _ties(self, box: Box) -> list[Line]:
        """Return the other readers of a box's parameters: `wte.weight: also read in stage 3, lm_head`."""
        lines = []
        for param, readers in self.drawn.ties.items():
            if box in readers:
                others = ", ".join(self._place(other) for other in readers if other is not box)
                lines.append(line((f"{short(note(param).name)}: also read in {others}", "quiet")))
        return lines

    def _place(self, box: Box) -> str:
        """Name a box by its stage and module: `stage 3, lm_head`."""
        what = range_text(list(box.folded)) if box.folded else note(box.nodes[-1]).module
        return f"stage {self.drawn.columns[box.column].stages[0]}{f', {what}' if what else ''}"

    def shape(self, node: Node) -> str:
        """Return shape and type: `[1, 128, 1152] S(dim 2: 3 x [12] x 64)`; no type if nothing is split."""
        if not self.is_split:
            return shape_text(node)
        record = note(node)
        # tp is not named if it is the only axis that splits.
        kind = record.layout.text(record.dims)
        if all(axis == "tp" for axis, _ in record.layout.over_mesh):
            kind = type_text(record.layout["tp"], record.dims, "tp").replace("S(tp, ", "S(")
        return f"{shape_text(node)}  {kind}"

    def _tooltip(self, box: Box) -> str:
        """Return a box's origin, its line of code, the reason of its split, and its costs."""
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
        # Inputs, received and sent values are computed elsewhere, and counted there.
        if self.work and not (box.is_input or box.is_received or box.sent_to >= 0):
            forward, backward = (sum(counts) for counts in zip(*map(self.work, box.nodes), strict=True))
            if forward:
                both = f"{count_text(forward)} FLOPs forward, {count_text(backward)} backward"
                lines.append(f"{both} on each rank")
        return "\n".join(text for text in (*lines, *call_lines(box.calls)) if text)


def _without_calls(part: Item | Frame) -> Item | Frame:
    if isinstance(part, Frame):
        return replace(part, inside=tuple(map(_without_calls, part.inside)))
    return replace(part, calls=())


def _stages_text(stages: Sequence[int]) -> str:
    """Name stages: `stage 0`, `stages 0 and 1`, `stages 0 to 7`."""
    if len(stages) == 1:
        return f"stage {stages[0]}"
    if len(stages) == 2:
        return f"stages {stages[0]} and {stages[1]}"
    if stages[-1] - stages[0] == len(stages) - 1:
        return f"stages {stages[0]} to {stages[-1]}"
    return f"{len(stages)} stages"


def likeness(likes: Sequence[Like]) -> list[str]:
    """Describe what folded layers equal: `5 layers like h.0`, `4 layers, like h.0, h.1 in turn`, `the last
    12 of 20 operators of h.0`.
    """
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
    """Return the last two names of a path: `h.3` of `transformer.h.3`."""
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
    """Tell whether a box adds two activations, as a residual stream does."""
    node = box.nodes[-1]
    # Constants and parameters such as a bias do not count.
    origins = [origin(arg) for arg in node.all_input_nodes]
    return len(box.nodes) == 1 and short_op(node) == "add" and len(origins) == 2 and not box.params


def conversion_of(node: Node) -> Conversion:
    """Return the conversion that a node performs."""
    return next(row for row in CONVERSIONS.values() if row.name == note(node).conversion)


def work_of(box: Box) -> tuple[str, str]:
    """Return the work of a conversion, forward and backward."""
    # As compiled: without a gradient, backward is "none".
    work = box.calls[0] if box.calls else conversion_of(box.nodes[-1])
    return work.forward, work.backward


def collectives_of(box: Box) -> list[str]:
    """Return the collectives of a conversion."""
    return [kind for kind in work_of(box) if kind in COLLECTIVES]
