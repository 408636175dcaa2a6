"""The picture of the operators: one of each distinct layer (level `layer`), or all of them (level `full`),
stage by stage.

In: a `Program` with its LOCAL graph. Out: a `Scene`: a frame for each stage, read top to bottom, and one for
each layer that is drawn apart. The colour of a link is the type of its value over tp, with the letter where
it begins.

    scene = layer_scene(program, folds=True)
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from autoptd.ir.notes import note
from autoptd.program.program import Program
from autoptd.wings.viz import colours
from autoptd.wings.viz.box_items import BoxItems
from autoptd.wings.viz.box_text import BoxText, Work
from autoptd.wings.viz.box_words import collectives_of, local_bytes, range_text
from autoptd.wings.viz.boxes import Box, Edge
from autoptd.wings.viz.colours import bars, call_lines
from autoptd.wings.viz.outline import Column, Outline, Tie, outline
from autoptd.wings.viz.samples import Sample
from autoptd.wings.viz.scene import Frame, Item, Line, Link, Scene, line
from autoptd.wings.viz.views import origin
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


__all__ = ["Work", "layer_scene"]
