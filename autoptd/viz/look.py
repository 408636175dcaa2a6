"""Colours and words of the graph pictures: one place, so that all levels speak alike.

bars(collectives)           # lines on coloured ground: "forward: 2 all-reduces, 768 KiB"
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from autoptd.program.calls import LOCAL_KINDS, wire_bytes
from autoptd.program.program import Program
from autoptd.program.specs import Collective
from autoptd.viz.scene import Item, Line, line
from autoptd.viz.words import bytes_text

# Of collectives.
KINDS = {
    "all-reduce": "#c62f2f",
    "all-gather": "#7a3fd1",
    "reduce-scatter": "#0e7f57",
    "all-to-all": "#a92f84",
    "send": "#1b6f8a",
}
EDGES = {"I": "#4a545e", "R": "#4a545e", "P": "#cc6a0a", "S": "#2463b5"}
# Ground of a stage, by pipeline rank.
RANKS = ("#f6f8fa", "#f1f6ea", "#f8f2f8", "#edf5f9")
COLUMN, ROW, WHOLE, VOCABULARY, SPLIT, SMALL = "#bcd4f5", "#f9d9a8", "#f7c6c6", "#d8c9ef", "#e3eefb", "#f6f7f8"
FOLDED, INPUT, SENT, TIED = "#e6e8eb", "#fffdf0", "#1b6f8a", "#a0529c"
ORDER = ("forward", "backward", "step")


def bars(calls: Iterable[Collective], times: str = "") -> tuple[Line, ...]:
    """What some collectives amount to, a line per direction and kind: `forward: 2 all-reduces, 768 KiB`.

    Bytes are payload; local changes of type are left out. `times` is put behind each ("each").
    """
    sums: dict[tuple[str, str, str], list[int]] = {}
    for one in calls:
        for phase, kind in (("forward", one.forward), ("backward", one.backward)):
            if kind not in LOCAL_KINDS:
                key = ("step" if one.scope == "step" else phase, kind, one.axis)
                sums.setdefault(key, []).append(one.payload_bytes)
    lines = []
    for phase, kind, axis in sorted(sums, key=lambda key: (ORDER.index(key[0]), key[1], key[2])):
        sizes = sums[phase, kind, axis]
        count = f"{len(sizes)} {kind}s" if len(sizes) > 1 else kind
        over = "" if kind == "send" or (axis == "tp" and phase != "step") else f" over {axis}"
        when = "once a step" if phase == "step" else phase
        lines.append(line(f"{when}: {count}{over}, {bytes_text(sum(sizes))}{times}", bar=KINDS.get(kind, "#555555")))
    return tuple(lines)


def told(calls: Sequence[Collective]) -> list[str]:
    """What a tooltip says of some collectives: each with its payload, what a rank sends, and why."""
    lines = []
    for one in calls[:8]:
        work = [
            f"{kind} {phase}"
            for phase, kind in (("forward", one.forward), ("backward", one.backward))
            if kind != "none"
        ]
        sent = sum(
            wire_bytes(kind, one.payload_bytes, one.group_size)
            for kind in (one.forward, one.backward)
            if kind != "none"
        )
        size = (
            f"{bytes_text(one.payload_bytes)} of payload, a rank sends {bytes_text(sent)}" if sent else "no bytes sent"
        )
        over = f"{one.group_size} ranks of {one.axis}"
        lines.append(f"{', '.join(work) or 'nothing'} over {over} in every {one.scope}: {size}: {one.why}")
    if len(calls) > 8:
        lines.append(f"and {len(calls) - 8} more like these")
    return lines


def heading(program: Program) -> tuple[str, tuple[str, ...]]:
    """Title and subtitle of a picture of the graph."""
    mesh, m, rows = program.mesh, program.num_microbatches, program.rows
    ranks = f"{mesh.size} rank{'s'[: mesh.size > 1]}"
    title = f"{ranks}: t={mesh.t} tensor x p={mesh.p} pipeline x d={mesh.d} data parallel"
    chunks = f", each with v={program.v} model chunks" if program.v > 1 else ""
    count = len(program.stages)
    first = (
        f"{count} stage{'s'[: count > 1]} on {mesh.p} pipeline rank{'s'[: mesh.p > 1]}{chunks}; in a step every replica runs"
        f" {m} microbatch{'es' if m > 1 else ''} of {rows} row{'s'[: rows != 1]}, schedule {program.schedule_name}."
    )
    return title, (
        first,
        "Shapes and bytes are those of one rank and one microbatch; bytes of collectives are their payload.",
    )


def work_shares(program: Program) -> list[float]:
    """Of every stage, in percent: forward and backward, of one microbatch on one rank."""
    costs, none = program.costs, [0] * len(program.stages)
    both = zip(costs.flops_per_stage or none, costs.backward_flops_per_stage or none, strict=True)
    work = [forward + backward for forward, backward in both]
    return [100 * one / max(sum(work), 1) for one in work]


def param_count(program: Program, stage: int) -> int:
    """Parameters of a stage on one tensor rank."""
    wanted = set(program.stages[stage].params)
    return sum(math.prod(one.local_shape(program.mesh)) for one in program.params if one.name in wanted)


def legend_of_kinds(calls: Iterable[Collective]) -> list[Item]:
    """A sample of the bar of every kind of collective among `calls`."""
    kinds = {kind for one in calls for kind in (one.forward, one.backward)} - {"send"}
    shown = ((kind, color) for kind, color in KINDS.items() if kind in kinds)
    return [Item("", (line(kind, bar=color),), border=color, thick=2.0) for kind, color in shown]


def sample(text: str, fill: str = "#ffffff", **look: str | float | bool) -> Item:
    """A box of the legend."""
    return Item("", tuple(line(one) for one in text.split("\n")), fill, **look)  # type: ignore[arg-type]


LEGEND_OF_TYPES = tuple(
    Item("", (line((kind, "bold"), f"  {text}"),), border=EDGES[kind], dashed=kind == "P")
    for kind, text in (
        ("I", "equal on all tensor ranks, and so is its gradient"),
        ("R", "equal, but its gradient is a partial sum"),
        ("P", "a partial sum on each rank"),
        ("S", "sharded: S(dim 2: 3 x [12] x 64) cuts the 12 of dim 2"),
    )
)

__all__ = ["EDGES", "KINDS", "LEGEND_OF_TYPES", "bars", "heading", "legend_of_kinds", "param_count", "sample", "told"]
