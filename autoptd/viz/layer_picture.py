"""The picture of the operators: one of each distinct layer (level `layer`), or all of them (level `full`), stage by stage.

In: a `Program` with its LOCAL graph. Out: a `Scene`. Each column is a stage, read top to bottom. The colour of a link is the
type of its value over tp, with the letter on it; a conversion that communicates has a box of its own with a coloured bar for
each direction; parameters are written into the box of their operator.

    scene = layer_scene(program, folds=True)
"""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator

from torch.fx import Node

from autoptd.ir.notes import note, tensor
from autoptd.ir.types import CONVERSIONS
from autoptd.program.program import Program
from autoptd.viz import look
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
from autoptd.viz.look import bars, told
from autoptd.viz.outline import Box, Column, Edge, Outline, Tie, outline
from autoptd.viz.scene import Frame, Item, Line, Link, Scene, line
from autoptd.viz.views import COLLECTIVES, origin, short_op
from autoptd.viz.words import bytes_text, count_text, letter

GEMMS = ("linear", "addmm", "matmul", "mm", "bmm", "baddbmm")
LONGEST = 46  # letters in a line
Work = Callable[[Node], tuple[int, int]]  # FLOPs of a node on one rank, forward and backward


def layer_scene(program: Program, *, folds: bool = True, stage: int | None = None, work: Work | None = None) -> Scene:
    """Return the picture; `folds`: layers like an earlier one as one box; `stage`: this one only; `work` for the tooltips."""
    return _Painter(program, outline(program, folds=folds, stage=stage), work).scene()


class _Painter:
    """Turns the parts of an outline into those of a scene."""

    def __init__(self, program: Program, drawn: Outline, work: Work | None) -> None:
        self.program, self.drawn, self.work = program, drawn, work
        self.is_split = program.mesh.t > 1
        self.boxes = {box.id: box for box in drawn.boxes}
        self.place = {box.id: i for i, box in enumerate(drawn.boxes)}
        self.is_alone = len(drawn.columns) < len(program.stages) and len(drawn.columns[0].stages) == 1 == len(
            drawn.columns
        )
        parts = Counter((box.column, box.layer, box.part) for box in drawn.boxes)
        self.framed = {key for key, count in parts.items() if key[2] and count > 1}

    def scene(self) -> Scene:
        title, subtitle = look.heading(self.program)
        frames = tuple(self._column(i, one) for i, one in enumerate(self.drawn.columns))
        links = [*map(self._tie, self.drawn.ties), *map(self._edge, self.drawn.edges)]
        if self.drawn.loss:
            links.append(Link(self.drawn.loss, "result", weight=4))
        others = tuple(one for one in self.drawn.others if one.conversion != "loss sum" or not self.drawn.loss)
        if self.is_alone:  # what it sends and gets is told in its boxes
            others = tuple(one for one in others if one.scope == "step")
        notes = tuple(f"Beside what is drawn: {one.text}." for one in bars(others))
        return Scene(title, subtitle, frames, tuple(links), self._legend(), notes=notes, calls=others)

    # columns and frames

    def _column(self, index: int, column: Column) -> Frame:
        """The frame of a stage, or of several that are drawn as one."""
        boxes = [box for box in self.drawn.boxes if box.column == index]
        inside: list[Item | Frame] = []
        for layer in dict.fromkeys(box.layer for box in boxes):
            of_layer = [box for box in boxes if box.layer == layer]
            inside += self._layer(layer, of_layer) if layer else map(self._item, of_layer)
        if self.drawn.loss and self.boxes[self.drawn.loss].column == index:
            inside.append(self._result())
        stages = column.stages
        fill = look.RANKS[self.program.rank_of_stage(stages[0]) % len(look.RANKS)] if len(stages) == 1 else "#fbfbfb"
        tooltip = "\n".join(told(column.calls))
        return Frame(f"stage_{stages[0]}", self._heading(column), tuple(inside), fill, "#9aa4ae", tooltip, column.calls)

    def _heading(self, column: Column) -> tuple[Line, ...]:
        program, stages = self.program, column.stages
        many = len(stages) > 1
        shares = look.work_shares(program)
        share = sum(shares[k] for k in stages)
        sizes = [look.param_count(program, k) for k in stages]
        if many:
            first = line(
                (f"stages {stages[0]} ... {stages[-1]}", "bold"), ("  they only repeat layers drawn before", "quiet")
            )
            each = (
                f"{count_text(min(sizes))} to {count_text(max(sizes))}"
                if min(sizes) < max(sizes)
                else count_text(sizes[0])
            )
            lines = [first, line(f"{each} parameters on each rank, {share:.0f} % of all FLOPs", "")]
        else:
            k = stages[0]
            place = f"  pipeline rank {program.rank_of_stage(k)}, model chunk {program.chunk_of_stage(k)}"
            first = line((f"stage {k}", "bold"), (place, "quiet"))
            lines = [first, line(f"{count_text(sizes[0])} parameters on each rank, {share:.0f} % of all FLOPs")]
        return (*lines, *(line((one.text, "quiet")) for one in bars(column.calls)))

    def _layer(self, layer: str, boxes: list[Box]) -> Iterator[Item | Frame]:
        """The frame of a layer with frames of its parts; none around a single box."""
        if len(boxes) < 3:
            yield from map(self._item, boxes)
            return
        inside: list[Item | Frame] = []
        for part in dict.fromkeys(box.part for box in boxes):
            of_part = [box for box in boxes if box.part == part]
            if (of_part[0].column, layer, part) in self.framed:
                items = tuple(self._item(box) for box in of_part)
                inside.append(Frame(f"{of_part[0].id}_part", (line((part, "bold")),), items, "#ffffff", "#cfd5db"))
            else:
                inside += map(self._item, of_part)
        like = sum(1 for box in self.drawn.boxes for one in box.folded.values() if one.layer == layer)
        more = (f"  {like} more like it are folded" if like else "", "quiet")
        yield Frame(f"{boxes[0].id}_layer", (line((layer, "bold"), more),), tuple(inside), "#ffffff", "#9aa4ae")

    # boxes

    def _item(self, box: Box) -> Item:
        node = box.nodes[-1]
        if box.is_input:
            kind = str(tensor(node).dtype).removeprefix("torch.")
            lines = (line((note(node).name, "bold"), (" input", "quiet")), line(f"{shape_text(node)} {kind}"))
            return Item(box.id, lines, look.INPUT, shape="note", tooltip=self._tooltip(box))
        if box.is_received:
            return self._received(box)
        if box.sent_to >= 0:
            lines = (line((f"to stage {box.sent_to}", "bold")), line(self._shape(node)), line(self._traffic(node)))
            return Item(box.id, lines, "#f2fafc", look.SENT, thick=1.6, tooltip=self._tooltip(box))
        if box.folded:
            return self._folded(box)
        if note(node).conversion:
            return self._conversion(box)
        return self._operator(box)

    def _received(self, box: Box) -> Item:
        node = box.nodes[0]
        stage, here = note(node).stages[0], self.drawn.columns[box.column].stages
        passed = f", passing by stage{'s' if here[0] - stage > 2 else ''} " if here[0] - stage > 1 else ""
        passed += f"{stage + 1} to {here[0] - 1}" if here[0] - stage > 2 else f"{stage + 1}" if passed else ""
        made = origin(node)
        what = f"{short_op(made)} of {note(made).module or 'the model'}"
        first = line((f"from stage {stage}", "bold"), (passed, "quiet"))
        lines = [first, line((what, "quiet")), line(self._shape(node))]
        if self.is_alone:
            lines.append(line(self._traffic(node)))
        return Item(box.id, tuple(lines), "#f2fafc", look.SENT, thick=1.6, tooltip=self._tooltip(box))

    def _traffic(self, node: Node) -> str:
        """What a value that crosses amounts to: `384 KiB, and its gradient back`."""
        return f"{bytes_text(local_bytes(node))}, {'and its gradient' if note(node).needs_grad else 'no gradient'} back"

    def _folded(self, box: Box) -> Item:
        layers = list(box.folded)
        name = f"{short(layers[0])} ... {short(layers[-1])}" if len(layers) > 1 else short(layers[0])
        equal = likeness(list(box.folded.values()))
        params = sum(math.prod(note(one).extra["local_shapes"][0]) for _, one, _ in dict.fromkeys(box.params))
        lines = [line((name, "bold")), *(line(text) for text in equal)]
        if params:
            count = len(self.drawn.columns[box.column].stages)
            where = "on each rank" if count == 1 else f"on the {count} stages together"
            lines.append(line((f"{count_text(params)} parameters {where}", "quiet")))
        lines += bars(box.calls)
        calls = tuple(box.calls)
        tooltip = "\n".join([f"{'; '.join(equal)}: drawn once, where it is first", *told(calls)])
        return Item(box.id, tuple(lines), look.FOLDED, shape="stack", tooltip=tooltip, calls=calls)

    def _conversion(self, box: Box) -> Item:
        node = box.nodes[-1]
        record, row = note(node), conversion_of(node)
        pair = next(f"{a} to {b}" for (a, b), one in CONVERSIONS.items() if one is row)
        title = f"{letter(row.name)}: {pair}" if letter(row.name) else pair
        lines = [line((title, "bold"), (f"  over {self.program.mesh.t} ranks of tp", "quiet"))]
        for phase, kind in zip(("forward", "backward"), work_of(box), strict=True):
            size = next(
                (f", {bytes_text(one.payload_bytes)}" for one in box.calls if kind in (one.forward, one.backward)), ""
            )
            if kind in COLLECTIVES:
                lines.append(line(f"{phase}: {kind}{size}", bar=look.KINDS[kind]))
            else:
                lines.append(line((f"{phase}: {'nothing' if kind == 'none' else kind}", "quiet")))
        again = [one for one in box.calls if one.conversion == "gathered again"]
        lines += [line(one.text + " again", bar=one.bar) for one in bars(again)]
        reason = record.why.partition(": ")[2] or record.why
        lines += [line((text, "quiet")) for text in textwrap.wrap(reason, 34)]
        lines += self._params(box)
        kinds = collectives_of(box)
        color, thick = (look.KINDS[kinds[0]], 2.0) if kinds else ("#9aa4ae", 1.0)
        tooltip = self._tooltip(box)
        return Item(box.id, tuple(lines), "#ffffff", color, "box", thick, not kinds, tooltip, tuple(box.calls))

    def _operator(self, box: Box) -> Item:
        node = box.nodes[-1]
        name, what = self._title(box)
        how, fill = self._split(node, box)
        if is_sum(box):
            lines = [line(("+ ", "bold"), what), line((self._shape(node), "quiet"))]
        else:
            lines = [line((name, "bold"), (" " if name else ""), (what, "quiet" if name else "bold"))]
            lines += [line(how)] if how else []
            lines += [line(self._shape(node)), *self._params(box)]
        summed = [one for one in box.calls if one.forward in COLLECTIVES or one.backward in COLLECTIVES]
        lines += bars(summed)
        swallowed = "swallowed" in note(node).extra
        if swallowed:
            lines.append(line(("while the weight's gradient is computed", "quiet")))
        border = look.KINDS["all-reduce"] if summed else "#9aa4ae"
        shape = "pill" if is_sum(box) else "box"
        thick = 2.0 if summed else 1.0
        return Item(box.id, tuple(lines), fill, border, shape, thick, False, self._tooltip(box), tuple(box.calls))

    def _title(self, box: Box) -> tuple[str, str]:
        """(module, operators) of a box: `c_attn`, `linear`; the whole module path outside of layers."""
        names = list(dict.fromkeys(map(short_op, box.nodes)))
        what = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
        module = note(box.nodes[-1]).module
        if box.layer:
            module = module.removeprefix(box.layer).removeprefix(".")
            if (box.column, box.layer, box.part) in self.framed:
                module = "" if module == box.part else module.removeprefix(f"{box.part}.")
        return ("" if module == what else module), what

    def _split(self, node: Node, box: Box) -> tuple[str, str]:
        """How an operator is split, in words and as a colour."""
        record = note(node)
        if not self.is_split:
            return "", look.SMALL
        if "vocabulary" in record.why and record.why.startswith("split by"):
            return "split by vocabulary", look.VOCABULARY
        if short_op(node) in GEMMS:
            weights = [note(made or one).layout.letter for _, one, made in box.params if len(tensor(one).shape) > 1]
            if record.layout.letter == "P":
                return "row split: each rank sums over its inputs", look.ROW
            if record.layout.letter == "S" and "S" in weights:
                return "column split: each rank has its outputs", look.COLUMN
            if record.layout.letter != "S":
                return "whole on every rank", look.WHOLE
        return "", look.SPLIT if record.layout.letter == "S" else look.SMALL

    def _params(self, box: Box) -> list[Line]:
        """`weight [96, 64] S(dim 0: 3 x [4] x 16)`: parameters in the box of their operator, and what is done on the way."""
        rows: dict[str, list[str]] = {}
        for name, node, conversion in box.params:
            is_told_here = conversion is not None and conversion not in box.nodes and note(conversion).conversion
            done = f", {conversion_of(conversion).forward}" if conversion is not None and is_told_here else ""
            rows.setdefault(f"{self._shape(node)}{done}", []).append(name)
        return [line((f"{', '.join(names)} {text}", "quiet")) for text, names in rows.items()]

    def _result(self) -> Item:
        over = "microbatches and dp" if self.program.mesh.d > 1 else "microbatches"
        calls = tuple(one for one in self.drawn.others if one.conversion == "loss sum")
        lines = (line(("loss", "bold"), (f" summed over {over}", "quiet")), *bars(calls))
        return Item("result", lines, shape="pill", tooltip="\n".join(told(calls)), calls=calls)

    # links

    def _edge(self, edge: Edge) -> Link:
        value, record = edge.value, note(edge.value)
        kind = record.layout.letter if self.is_split else "I"
        size = f"{self._shape(value)}, {bytes_text(local_bytes(value))} on each rank"
        tooltip = f"{note(origin(value)).module or 'model'}: {size}"
        if edge.crosses and self.is_alone:
            return Link(edge.source, edge.target, look.SENT, 3.0, tooltip=tooltip, weight=2)
        if edge.crosses:
            lines = tuple(line((f"{one.text}", "")) for one in bars(edge.calls))
            if not lines and not edge.calls:
                lines = (line((f"of these {bytes_text(local_bytes(value))}", "quiet")),)
            tooltip = "\n".join([tooltip, *told(edge.calls)])
            return Link(edge.source, edge.target, look.SENT, 3.5, False, "", lines, tooltip, weight=0, calls=edge.calls)
        gap = self.place[edge.target] - self.place[edge.source]
        return Link(
            edge.source,
            edge.target,
            look.EDGES[kind],
            1.4 if kind in "IR" else 1.8,
            kind == "P",
            kind if self.is_split else "",
            tooltip=tooltip,
            weight=6 if gap == 1 else 1,
        )

    def _tie(self, tie: Tie) -> Link:
        name = note(tie.param).name
        lines = (line(("one parameter: ", ""), (name, "bold")), *(line(one.text) for one in bars(tie.calls)))
        tooltip = "\n".join([f"{name} is read by both", *told(tie.calls)])
        return Link(
            tie.first, tie.second, look.TIED, 1.8, True, "", lines, tooltip, weight=0, has_head=False, calls=tie.calls
        )

    # words

    def _shape(self, node: Node) -> str:
        """`[1, 128, 1152] S(dim 2: 3 x [12] x 64)`; without the type where nothing is split."""
        record = note(node)
        kind = record.layout.text(record.dims).replace("S(tp, ", "S(") if self.is_split else ""
        return f"{shape_text(node)}  {kind}".strip()

    def _tooltip(self, box: Box) -> str:
        """Where it comes from, its line of code, why it is as it is, what it costs."""
        node = box.nodes[-1]
        record = note(node)
        where = f"{record.module or 'model'} ({record.source})" if record.source else record.module or record.name
        size = (
            f"{shape_text(node)} of {list(record.extra['global_shape'])} traced"
            if "global_shape" in record.extra
            else shape_text(node)
        )
        lines = [where, record.code, f"why: {record.why}" if record.why else "", record.placement]
        lines.append(
            f"{size} {str(tensor(node).dtype).removeprefix('torch.')}: {bytes_text(local_bytes(node))} on each rank"
        )
        if self.work and not box.is_input and not box.is_received:
            forward, backward = (sum(one) for one in zip(*map(self.work, box.nodes), strict=True))
            if forward:
                lines.append(f"{count_text(forward)} FLOPs forward, {count_text(backward)} backward on each rank")
        return "\n".join(one for one in (*lines, *told(box.calls)) if one)

    def _legend(self) -> tuple[Item, ...]:
        """Samples of what is in this picture."""
        operators = [one for one in self.drawn.boxes if not (one.is_input or one.is_received or one.folded)]
        fills = {self._split(box.nodes[-1], box)[1] for box in operators if not note(box.nodes[-1]).conversion}
        samples = [
            look.sample("column split", look.COLUMN),
            look.sample("row split", look.ROW),
            look.sample("split by vocabulary", look.VOCABULARY),
            look.sample("works on a shard", look.SPLIT),
            look.sample("GEMM that every rank computes", look.WHOLE),
        ]
        found = [one for one in samples if one.fill in fills]
        if any(box.folded for box in self.drawn.boxes):
            found.append(look.sample("layers like one drawn before", look.FOLDED, shape="stack"))
        if self.is_split:
            if any(note(box.nodes[-1]).conversion and not box.folded and not collectives_of(box) for box in operators):
                found.append(look.sample("type changes without communication", dashed=True))
            calls = [one for box in self.drawn.boxes for one in box.calls]
            found += look.legend_of_kinds(calls)
            if any(letter(one.conversion) for one in calls):
                found.append(Item("", (line(("f, g", "bold"), "  Megatron-LM's names of I to R and P to I"),)))
            found += look.LEGEND_OF_TYPES
        return tuple(found)


__all__ = ["Work", "layer_scene"]
