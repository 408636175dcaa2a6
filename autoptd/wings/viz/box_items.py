"""Turn the boxes of an outline into items of a scene: their lines, colours and shapes.

In: a `Program`, its `Outline`, and the `BoxText` that words the details. Out: an `Item` per box. An operator
is coloured by how it is split, a conversion that communicates has a bar for each direction, and parameters
are written into the box of their operator.

    BoxItems(program, drawn, text, is_alone=False).item(box)
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence

from autoptd.ir.notes import note, tensor
from autoptd.ir.types import CONVERSIONS
from autoptd.program.program import Program
from autoptd.wings.viz import colours
from autoptd.wings.viz.box_text import BoxText
from autoptd.wings.viz.box_words import (
    collectives_of,
    conversion_of,
    is_sum,
    likeness,
    local_bytes,
    range_text,
    shape_text,
    work_of,
)
from autoptd.wings.viz.boxes import Box
from autoptd.wings.viz.colours import bars, call_lines
from autoptd.wings.viz.outline import Outline
from autoptd.wings.viz.scene import Item, Line, line
from autoptd.wings.viz.views import COLLECTIVES, origin, short_op
from autoptd.wings.words import bytes_text, count_text, letter

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


__all__ = ["BoxItems"]
