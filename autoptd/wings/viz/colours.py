"""Define the colours and texts that all graph pictures share, and their colours on dark screens.

A picture has its light colours as attributes (`fill="#bcd4f5"`), and a style sheet in a media query that replaces them
on dark screens; viewers without style sheets, and printers, use the attributes.

    bars(collectives)                       # "forward: 2 all-reduces, 768 KiB" on coloured ground
    dark_rules('<rect fill="#bcd4f5"/>')    # '@media screen and (prefers-color-scheme: dark) {...}'
"""

from __future__ import annotations

import math
import re
from collections.abc import Container, Iterable, Iterator, Sequence

from autoptd.ir.types import LOCAL_KINDS, wire_bytes
from autoptd.program.program import Program
from autoptd.program.specs import Collective
from autoptd.wings.viz.scene import INK, Item, Line, line
from autoptd.wings.words import bytes_text, plural

# The colour of a collective, wherever it is drawn.
KINDS = {
    "all-reduce": "#c62f2f",
    "all-gather": "#7a3fd1",
    "reduce-scatter": "#0e7f57",
    "all-to-all": "#a92f84",
    "send": "#1b6f8a",
}
# The colour of a link, by the type of its value over tp.
EDGES = {"I": "#4a545e", "R": "#4a545e", "P": "#cc6a0a", "S": "#2463b5"}
# Ground of a stage, by pipeline rank: light, as boxes stand on it.
RANKS = ("#f6f8fa", "#f1f6ea", "#f8f2f8", "#edf5f9")
COLUMN, ROW, WHOLE, VOCABULARY, SPLIT, SMALL = (
    "#bcd4f5",
    "#f9d9a8",
    "#f7c6c6",
    "#d8c9ef",
    "#e3eefb",
    "#f6f7f8",
)
FOLDED, INPUT, RECEIVED, SENT = "#e6e8eb", "#fffdf0", "#f2fafc", "#1b6f8a"
# Ground and border of a layer that is drawn apart, and of its parts.
APART, PART, PART_BORDER = "#fcfcfd", "#ffffff", "#cfd5db"
# Border of boxes and frames, ground of several stages that are drawn as one.
BORDER, SEVERAL = "#9aa4ae", "#fbfbfb"
MAX_TOOLTIP_CALLS = 8
ORDER = ("forward", "backward", "step", "update")
ONCE = {"step": "once a step", "update": "once an update"}


def bars(calls: Iterable[Collective]) -> tuple[Line, ...]:
    """Sum up collectives, a line per direction, kind and axis: `forward: 2 all-reduces, 768 KiB`.

    Bytes are payload; local changes of type are left out.
    """
    sums: dict[tuple[str, str, str], list[int]] = {}
    for call in calls:
        for phase, kind in (("forward", call.forward), ("backward", call.backward)):
            if kind not in LOCAL_KINDS:
                key = (call.scope if call.scope in ONCE else phase, kind, call.axis)
                sums.setdefault(key, []).append(call.payload_bytes)
    lines = []
    for phase, kind, axis in sorted(sums, key=lambda key: (ORDER.index(key[0]), key[1], key[2])):
        sizes = sums[phase, kind, axis]
        count = f"{len(sizes)} {kind}s" if len(sizes) > 1 else kind
        # Sends are over pp, and within a stage tp is the only axis: neither is named.
        over = "" if kind == "send" or (axis == "tp" and phase not in ONCE) else f" over {axis}"
        lines.append(
            line(
                f"{ONCE.get(phase, phase)}: {count}{over}, {bytes_text(sum(sizes))}",
                bar=KINDS.get(kind, "#555555"),
            )
        )
    return tuple(lines)


def call_lines(calls: Sequence[Collective]) -> list[str]:
    """Describe collectives in a tooltip: each with its payload, the bytes that a rank sends, and its reason."""
    lines = []
    for call in calls[:MAX_TOOLTIP_CALLS]:
        work = []
        sent = 0
        for phase, kind in (("forward", call.forward), ("backward", call.backward)):
            if kind != "none":
                work.append(f"{kind} {phase}")
                sent += wire_bytes(kind, call.payload_bytes, call.group_size)
        size = "no bytes sent"
        if sent:
            size = f"{bytes_text(call.payload_bytes)} of payload, a rank sends {bytes_text(sent)}"
        over = f"{call.group_size} ranks of {call.axis}"
        lines.append(f"{', '.join(work) or 'nothing'} over {over} in every {call.scope}: {size}: {call.why}")
    if len(calls) > MAX_TOOLTIP_CALLS:
        lines.append(f"and {len(calls) - MAX_TOOLTIP_CALLS} more like these")
    return lines


def heading(program: Program) -> tuple[str, tuple[str, ...]]:
    """Return title and subtitle of a picture of the graph."""
    mesh, m, rows = program.mesh, program.num_microbatches, program.rows
    title = f"{plural(mesh.size, 'rank')}: {mesh.words}"
    chunks = f", each with v={program.v} model chunks" if program.v > 1 else ""
    stages = f"{plural(len(program.stages), 'stage')} on {plural(mesh.p, 'pipeline rank')}{chunks}"
    microbatches = f"{plural(m, 'microbatch')} of {plural(rows, 'sample')}"
    first = f"{stages}; in a step every replica runs {microbatches}, schedule {program.schedule_name}."
    return title, (
        first,
        "Shapes and bytes are those of one rank and one microbatch; bytes of collectives are their payload.",
    )


def work_shares(program: Program) -> list[float]:
    """Return the percentage of all FLOPs of each stage: forward and backward, one microbatch, one rank."""
    # A program written by hand has no costs.
    costs, none = program.costs, [0] * len(program.stages)
    both = zip(costs.flops_per_stage or none, costs.backward_flops_per_stage or none, strict=True)
    work = [forward + backward for forward, backward in both]
    total = max(sum(work), 1)
    return [100 * amount / total for amount in work]


def param_count(program: Program, stage: int) -> int:
    """Count the parameters of a stage on one tensor rank."""
    # A tied parameter counts on each of its stages: each stores a copy.
    wanted = set(program.stages[stage].params)
    return sum(math.prod(spec.local_shape(program.mesh)) for spec in program.params if spec.name in wanted)


def legend_of_kinds(calls: Iterable[Collective]) -> list[Item]:
    """Return a sample bar for every kind of collective among `calls`."""
    kinds: set[str] = set()
    for call in calls:
        # What comes once a step is written without a bar.
        if call.scope == "microbatch":
            kinds |= {call.forward, call.backward}
    samples = []
    for kind, color in KINDS.items():
        if kind in kinds:
            samples.append(Item("", (line(kind, bar=color),), border=color, thick=2.0))
    return samples


def sample(text: str, fill: str = "#ffffff", **look: str | float | bool) -> Item:
    """Make a box of the legend."""
    return Item("", tuple(line(row) for row in text.split("\n")), fill, **look)  # type: ignore[arg-type]


LEGEND_OF_SPLITS = (
    sample("column split", COLUMN),
    sample("row split", ROW),
    sample("split by vocabulary", VOCABULARY),
    sample("works on a shard", SPLIT),
    sample("GEMM that every rank computes", WHOLE),
)


def legend_of_types(letters: Container[str], shard: str) -> Iterator[Item]:
    """Yield a sample for each type among `letters`; `shard` is one as the picture writes it."""
    cut = re.search(r"dim (\d+): .*?\[(\w+)\]", shard)
    texts = {
        "I": "equal on all tensor ranks, and so is its gradient",
        "R": "equal, but its gradient is a partial sum",
        "P": "a partial sum on each rank",
        "S": f"sharded: {shard} cuts the {cut[2]} of dim {cut[1]}" if cut else "sharded",
    }
    for kind, text in texts.items():
        if kind in letters:
            yield Item("", (line((kind, "bold"), f"  {text}"),), border=EDGES[kind], dashed=kind == "P")


PAPER, DARK_INK, DARK_QUIET = "#12171d", "#dde3ea", "#a6b1bc"
# Grounds: dark shades of the light ones, on which light text can be read.
FILLS = {
    "#ffffff": "#1a2129",
    "#fff": PAPER,
    COLUMN: "#24456f",
    ROW: "#654618",
    WHOLE: "#6d2e2e",
    VOCABULARY: "#483770",
    SPLIT: "#1f2e42",
    SMALL: "#212932",
    FOLDED: "#303943",
    INPUT: "#2f2d1c",
    RECEIVED: "#14303b",
    APART: "#161c23",
    RANKS[0]: "#171e26",
    RANKS[1]: "#18211a",
    RANKS[2]: "#211a23",
    RANKS[3]: "#17232b",
    SEVERAL: "#191f26",
}
# Borders and links: light shades, which stand out from dark grounds.
STROKES = {
    INK: "#c3ccd5",
    BORDER: "#5f6b77",
    PART_BORDER: "#3c4650",
    EDGES["I"]: "#aeb9c4",
    EDGES["P"]: "#f0a04b",
    EDGES["S"]: "#79aff2",
    SENT: "#5cbfdb",
    KINDS["all-reduce"]: "#e8716c",
    KINDS["all-gather"]: "#ad91f2",
    KINDS["reduce-scatter"]: "#46bf93",
    KINDS["all-to-all"]: "#de83c3",
    # Messages of the schedule chart, forward and backward.
    "#1f53a0": "#79aff2",
    "#1c703e": "#6fbf8c",
}
DARK_TEXT = (
    f"text {{ fill: {DARK_INK} }} .quiet, .subtitle {{ fill: {DARK_QUIET} }} .on-bar {{ fill: #fff }}",
)


def dark_rules(drawn: str, text: Sequence[str] = DARK_TEXT) -> str:
    """Return the style sheet of a picture for dark screens; `text` are its rules for classes."""
    rules = list(text)
    fills, strokes = (set(re.findall(rf'{name}="(#\w+)"', drawn)) for name in ("fill", "stroke"))
    rules += [f'[fill="{light}"] {{ fill: {dark} }}' for light, dark in FILLS.items() if light in fills]
    # The ground of a frame lies around its heading, too.
    rules += [f'[stroke="{light}"] {{ stroke: {dark} }}' for light, dark in FILLS.items() if light in strokes]
    for light, dark in STROKES.items():
        if light in strokes:
            rules.append(f'[stroke="{light}"] {{ stroke: {dark} }}')
        # Arrow heads and letters are filled with the colour of their link; bars keep theirs.
        if light in fills:
            rules.append(f'polygon[fill="{light}"], tspan[fill="{light}"] {{ fill: {dark} }}')
    inside = "\n".join(f"    {rule}" for rule in rules)
    return f"  @media screen and (prefers-color-scheme: dark) {{\n{inside}\n  }}\n"
