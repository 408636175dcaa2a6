"""The picture of the operators: one of each distinct layer (level `layer`), or all of them (level `full`),
stage by stage.

In: a `Program` with its LOCAL graph. Out: a `Scene`. Each column is a stage, read top to bottom. The colour
of a link is the type of its value over tp, with the letter on it; a conversion that communicates has a box of
its own with a coloured bar for each direction; parameters are written into the box of their operator.

    scene = layer_scene(program, folds=True)
"""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Iterator

from autoptd.ir.notes import note, tensor
from autoptd.ir.types import CONVERSIONS
from autoptd.program.program import Program
from autoptd.viz import colours
from autoptd.viz.box_text import BoxText, Work
from autoptd.viz.box_words import (
    collectives_of,
    conversion_of,
    is_sum,
    likeness,
    local_bytes,
    shape_text,
    short,
    work_of,
)
from autoptd.viz.colours import bars, call_lines
from autoptd.viz.outline import Box, Column, Edge, Outline, Tie, outline
from autoptd.viz.scene import Frame, Item, Line, Link, Scene, line
from autoptd.viz.views import COLLECTIVES, origin, short_op
from autoptd.viz.words import bytes_text, count_text, letter


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
        self.boxes = {box.id: box for box in drawn.boxes}
        self.place = {box.id: i for i, box in enumerate(drawn.boxes)}
        # One stage alone was asked for, of a program with several.
        self.is_alone = len(drawn.columns) == len(drawn.columns[0].stages) == 1 < len(program.stages)
        parts = Counter((box.column, box.layer, box.part) for box in drawn.boxes)
        self.framed = {key for key, count in parts.items() if key[2] and count > 1}
        self.text = BoxText(self.is_split, self.framed, work)

    def scene(self) -> Scene:
        title, subtitle = colours.heading(self.program)
        frames = tuple(self._column(i, column) for i, column in enumerate(self.drawn.columns))
        links = [*map(self._tie, self.drawn.ties), *map(self._edge, self.drawn.edges)]
        if self.drawn.loss:
            links.append(Link(self.drawn.loss, "result", weight=4))
        # The box of the result shows the sum of the loss.
        others = tuple(
            call for call in self.drawn.others if call.conversion != "loss sum" or not self.drawn.loss
        )
        # The boxes of a stage alone show what it sends and receives.
        if self.is_alone:
            others = tuple(call for call in others if call.scope != "microbatch")
        notes = tuple(f"Beside what is drawn: {bar.text}." for bar in bars(others))
        return Scene(title, subtitle, frames, tuple(links), self._legend(), notes=notes, calls=others)

    # columns and frames

    def _column(self, index: int, column: Column) -> Frame:
        """Return the frame of a stage, or of several that are drawn as one."""
        boxes = [box for box in self.drawn.boxes if box.column == index]
        inside: list[Item | Frame] = []
        for layer in dict.fromkeys(box.layer for box in boxes):
            of_layer = [box for box in boxes if box.layer == layer]
            inside += self._layer(layer, of_layer) if layer else map(self._item, of_layer)
        if self.drawn.loss and self.boxes[self.drawn.loss].column == index:
            inside.append(self._result())
        stages = column.stages
        fill = "#fbfbfb"
        if len(stages) == 1:
            fill = colours.RANKS[self.program.rank_of_stage(stages[0]) % len(colours.RANKS)]
        tooltip = "\n".join(call_lines(column.calls))
        return Frame(
            f"stage_{stages[0]}", self._heading(column), tuple(inside), fill, "#9aa4ae", tooltip, column.calls
        )

    def _heading(self, column: Column) -> tuple[Line, ...]:
        program, stages = self.program, column.stages
        shares = colours.work_shares(program)
        share = sum(shares[k] for k in stages)
        sizes = [colours.param_count(program, k) for k in stages]
        if len(stages) > 1:
            name, remark = f"stages {stages[0]} ... {stages[-1]}", "  they only repeat layers drawn before"
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
        if len(boxes) < 3:
            yield from map(self._item, boxes)
            return
        inside: list[Item | Frame] = []
        for part in dict.fromkeys(box.part for box in boxes):
            of_part = [box for box in boxes if box.part == part]
            if (of_part[0].column, layer, part) in self.framed:
                items = tuple(self._item(box) for box in of_part)
                inside.append(
                    Frame(f"{of_part[0].id}_part", (line((part, "bold")),), items, "#ffffff", "#cfd5db")
                )
            else:
                inside += map(self._item, of_part)
        folded = [like.layer for box in self.drawn.boxes for like in box.folded.values()]
        count = folded.count(layer)
        more = (f"  {count} more like it are folded" if count else "", "quiet")
        yield Frame(
            f"{boxes[0].id}_layer", (line((layer, "bold"), more),), tuple(inside), "#ffffff", "#9aa4ae"
        )

    # boxes

    def _item(self, box: Box) -> Item:
        node = box.nodes[-1]
        if box.is_input:
            kind = str(tensor(node).dtype).removeprefix("torch.")
            lines = (line((note(node).name, "bold"), (" input", "quiet")), line(f"{shape_text(node)} {kind}"))
            return Item(box.id, lines, colours.INPUT, shape="note", tooltip=self.text.tooltip(box))
        if box.is_received:
            return self._received(box)
        if box.sent_to >= 0:
            lines = (
                line((f"to stage {box.sent_to}", "bold")),
                line(self.text.shape(node)),
                line(self.text.traffic(node)),
            )
            return Item(box.id, lines, "#f2fafc", colours.SENT, thick=1.6, tooltip=self.text.tooltip(box))
        if box.folded:
            return self._folded(box)
        if note(node).conversion:
            return self._conversion(box)
        return self._operator(box)

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
        first = line((f"from stage {stage}", "bold"), (passed, "quiet"))
        lines = [first, line((what, "quiet")), line(self.text.shape(node))]
        if self.is_alone:
            lines.append(line(self.text.traffic(node)))
        return Item(box.id, tuple(lines), "#f2fafc", colours.SENT, thick=1.6, tooltip=self.text.tooltip(box))

    def _folded(self, box: Box) -> Item:
        layers = list(box.folded)
        name = f"{short(layers[0])} ... {short(layers[-1])}" if len(layers) > 1 else short(layers[0])
        equal = likeness(list(box.folded.values()))
        # Layers may share a parameter: each is counted once.
        params = sum(
            math.prod(note(param).extra["local_shapes"][0]) for _, param, _ in dict.fromkeys(box.params)
        )
        lines = [line((name, "bold")), *(line(text) for text in equal)]
        if params:
            count = len(self.drawn.columns[box.column].stages)
            where = "on each rank" if count == 1 else f"on the {count} stages together"
            lines.append(line((f"{count_text(params)} parameters {where}", "quiet")))
        lines += bars(box.calls)
        calls = tuple(box.calls)
        tooltip = "\n".join([f"{'; '.join(equal)}: drawn once, where it is first", *call_lines(calls)])
        return Item(box.id, tuple(lines), colours.FOLDED, shape="stack", tooltip=tooltip, calls=calls)

    def _conversion(self, box: Box) -> Item:
        node = box.nodes[-1]
        record, row = note(node), conversion_of(node)
        pair = next(f"{a} to {b}" for (a, b), other in CONVERSIONS.items() if other is row)
        title = f"{letter(row.name)}: {pair}" if letter(row.name) else pair
        lines = [line((title, "bold"), (f"  over {self.program.mesh.t} ranks of tp", "quiet"))]
        for phase, kind in zip(("forward", "backward"), work_of(box), strict=True):
            if kind in COLLECTIVES:
                sizes = [call.payload_bytes for call in box.calls if kind in (call.forward, call.backward)]
                size = f", {bytes_text(sizes[0])}" if sizes else ""
                lines.append(line(f"{phase}: {kind}{size}", bar=colours.KINDS[kind]))
            else:
                lines.append(line((f"{phase}: {'nothing' if kind == 'none' else kind}", "quiet")))
        again = [call for call in box.calls if call.conversion == "gathered again"]
        lines += [line(bar.text + " again", bar=bar.bar) for bar in bars(again)]
        reason = record.why.partition(": ")[2] or record.why
        lines += [line((text, "quiet")) for text in textwrap.wrap(reason, 34)]
        lines += self.text.params(box)
        kinds = collectives_of(box)
        color, thick = (colours.KINDS[kinds[0]], 2.0) if kinds else ("#9aa4ae", 1.0)
        tooltip = self.text.tooltip(box)
        return Item(
            box.id,
            tuple(lines),
            "#ffffff",
            color,
            thick=thick,
            dashed=not kinds,
            tooltip=tooltip,
            calls=tuple(box.calls),
        )

    def _operator(self, box: Box) -> Item:
        node = box.nodes[-1]
        name, what = self.text.title(box)
        how, fill = self.text.split(node, box)
        if is_sum(box):
            lines = [line(("+ ", "bold"), what), line((self.text.shape(node), "quiet"))]
        else:
            # Without a module of its own, an operator's name is the heading.
            lines = [line((name, "bold"), (" " if name else ""), (what, "quiet" if name else "bold"))]
            if how:
                lines.append(line(how))
            lines += [line(self.text.shape(node)), *self.text.params(box)]
        summed = [call for call in box.calls if call.forward in COLLECTIVES or call.backward in COLLECTIVES]
        lines += bars(summed)
        # The all-reduce of a GEMM with a hook is hidden behind its second GEMM.
        if "absorbed" in note(node).extra:
            lines.append(line(("while the weight's gradient is computed", "quiet")))
        return Item(
            box.id,
            tuple(lines),
            fill,
            border=colours.KINDS["all-reduce"] if summed else "#9aa4ae",
            shape="pill" if is_sum(box) else "box",
            thick=2.0 if summed else 1.0,
            tooltip=self.text.tooltip(box),
            calls=tuple(box.calls),
        )

    def _result(self) -> Item:
        over = "microbatches and dp" if self.program.mesh.d > 1 else "microbatches"
        calls = tuple(call for call in self.drawn.others if call.conversion == "loss sum")
        lines = (line(("loss", "bold"), (f" summed over {over}", "quiet")), *bars(calls))
        return Item("result", lines, shape="pill", tooltip="\n".join(call_lines(calls)), calls=calls)

    # links

    def _edge(self, edge: Edge) -> Link:
        value, record = edge.value, note(edge.value)
        kind = record.layout.letter if self.is_split else "I"
        size = f"{self.text.shape(value)}, {bytes_text(local_bytes(value))} on each rank"
        tooltip = f"{note(origin(value)).module or 'model'}: {size}"
        if edge.crosses and self.is_alone:
            return Link(edge.source, edge.target, colours.SENT, 3.0, tooltip=tooltip, weight=2)
        if edge.crosses:
            lines = tuple(line(bar.text) for bar in bars(edge.calls))
            if not lines and not edge.calls:
                lines = (line((f"of these {bytes_text(local_bytes(value))}", "quiet")),)
            tooltip = "\n".join([tooltip, *call_lines(edge.calls)])
            return Link(
                edge.source,
                edge.target,
                colours.SENT,
                width=3.5,
                lines=lines,
                tooltip=tooltip,
                weight=0,
                calls=edge.calls,
            )
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
            weight=6 if gap == 1 else 1,
        )

    def _tie(self, tie: Tie) -> Link:
        name = note(tie.param).name
        return colours.tie_link(tie.first, tie.second, name, f"{name} is read by both", tie.calls)

    def _legend(self) -> tuple[Item, ...]:
        """Return samples of what is in this picture."""
        operators: list[Box] = []
        conversions: list[Box] = []
        for box in self.drawn.boxes:
            if not (box.is_input or box.is_received or box.folded):
                group = conversions if note(box.nodes[-1]).conversion else operators
                group.append(box)
        fills = {self.text.split(box.nodes[-1], box)[1] for box in operators}
        samples = [
            colours.sample("column split", colours.COLUMN),
            colours.sample("row split", colours.ROW),
            colours.sample("split by vocabulary", colours.VOCABULARY),
            colours.sample("works on a shard", colours.SPLIT),
            colours.sample("GEMM that every rank computes", colours.WHOLE),
        ]
        legend = [sample for sample in samples if sample.fill in fills]
        if any(box.folded for box in self.drawn.boxes):
            legend.append(colours.sample("layers like one drawn before", colours.FOLDED, shape="stack"))
        if not self.is_split:
            return tuple(legend)
        if not all(map(collectives_of, conversions)):
            legend.append(colours.sample("type changes without communication", dashed=True))
        calls = [call for box in self.drawn.boxes for call in box.calls]
        legend += colours.legend_of_kinds(calls)
        if any(letter(call.conversion) for call in calls):
            megatron = line(("f, g", "bold"), "  Megatron-LM's names of I to R and P to I")
            legend.append(Item("", (megatron,)))
        return (*legend, *colours.LEGEND_OF_TYPES)


__all__ = ["Work", "layer_scene"]
