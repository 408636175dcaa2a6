"""What the boxes of the operators say: title, how it is split, shapes, parameters, tooltip.

In: a `Box` of an outline. Out: text and lines for its `Item`.

    text = BoxText(is_split=True, framed=set(), work=None)
    text.title(box)           # ("c_attn", "linear")
    text.shape(node)          # "[1, 128, 1152] S(dim 2: 3 x [12] x 64)"
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch.fx import Node

from autoptd.ir.notes import note, tensor
from autoptd.ir.operators.table import operator_of
from autoptd.ir.types import type_text
from autoptd.wings.viz import colours
from autoptd.wings.viz.box_words import conversion_of, local_bytes, shape_text
from autoptd.wings.viz.boxes import Box
from autoptd.wings.viz.colours import call_lines
from autoptd.wings.viz.scene import Line, line
from autoptd.wings.viz.views import short_op
from autoptd.wings.words import bytes_text, count_text

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


__all__ = ["BoxText", "Work"]
