"""Draw the stages: their contents, collectives and messages (level `model`).

In: a `Program`; its graphs are not needed. Out: a `Scene`: a grid with a column for each pipeline rank and a row for
each model chunk. Of many ranks or chunks, those in the middle share a box.

    scene = model_scene(program)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from autoptd.program.program import Program
from autoptd.program.specs import Collective, CrossingSpec
from autoptd.wings.viz import colours
from autoptd.wings.viz.colours import bars, call_lines
from autoptd.wings.viz.scene import Item, Line, Link, Scene, line
from autoptd.wings.words import count_text

# Of more ranks or chunks, those in the middle are drawn as one.
RANKS_APART, CHUNKS_APART = 6, 6


@dataclass(frozen=True)
class Cell:
    """The stages of some neighbouring pipeline ranks (`column`) and chunks (`row`), ascending."""

    row: int
    column: int
    stages: tuple[int, ...]

    @property
    def id(self) -> str:
        return f"stage_{self.stages[0]}"


def model_scene(program: Program, stage: int | None = None) -> Scene:
    """Return the picture; with `stage`, of that stage and those that it talks to."""
    return _Painter(program, stage).scene()


class _Painter:
    def __init__(self, program: Program, stage: int | None) -> None:
        self.program = program
        self.cells = find_cells(program)
        if stage is not None:
            peers = _peers(program, stage)
            self.cells = [Cell(program.chunk_of_stage(k), program.rank_of_stage(k), (k,)) for k in peers]
        self.home = {k: cell for cell in self.cells for k in cell.stages}
        self.between: dict[tuple[Cell, Cell], list[Collective]] = {}
        self.inside: dict[Cell, list[Collective]] = {}
        self.left: list[Collective] = []
        for call in program.collectives:
            self._sort(call)

    def scene(self) -> Scene:
        title, subtitle = colours.heading(self.program)
        rows: dict[int, list[str]] = {}
        for cell in sorted(self.cells, key=lambda cell: (cell.row, cell.column)):
            rows.setdefault(cell.row, []).append(cell.id)
        links = tuple(self._links())
        notes = tuple(f"Not in the picture: {bar.text}." for bar in bars(self.left))
        ids = tuple(map(tuple, rows.values()))
        items = tuple(map(self._cell, self.cells))
        return Scene(title, subtitle, items, links, self._legend(), ids, notes, tuple(self.left))

    def _sort(self, call: Collective) -> None:
        """Assign a collective to a link, a box or a note."""
        ends = re.fullmatch(r"stage (\d+) to (\d+)", call.site)
        if ends:
            # A gradient returns on the link of its value.
            first, second = (self.home.get(k) for k in sorted(map(int, ends.groups())))
            if first is None or second is None:
                self.left.append(call)
            elif first == second:
                self.inside.setdefault(first, []).append(call)
            else:
                self.between.setdefault((first, second), []).append(call)
        # The loss is summed over all stages.
        elif call.conversion != "loss sum" and call.stage in self.home:
            self.inside.setdefault(self.home[call.stage], []).append(call)
        else:
            self.left.append(call)

    # boxes

    def _cell(self, cell: Cell) -> Item:
        program, stages = self.program, cell.stages
        ranks = sorted({program.rank_of_stage(k) for k in stages})
        name = f"stages {stages[0]} ... {stages[-1]}" if len(stages) > 1 else f"stage {stages[0]}"
        plural = "s" if len(ranks) > 1 else ""
        place = f"  pipeline rank{plural} {_range(ranks)}, chunk {program.chunk_of_stage(stages[0])}"
        of_stage = colours.work_shares(program)
        # The range over all stages of a cell.
        shares = [of_stage[k] for k in stages]
        sizes = [colours.param_count(program, k) for k in stages]
        each = " each" if len(stages) > 1 else ""
        lines = [
            line((name, "bold"), (place, "quiet")),
            *(line(text) for text in _wrapped(_modules(program, stages))),
            line((f"{_span(sizes, count_text)} parameters on each rank{each}", "quiet")),
            line((f"{_span(shares, _percent_text)} % of all FLOPs{each}", "quiet")),
        ]
        read = dict.fromkeys(name for k in stages for name in program.stages[k].inputs)
        lines += [line(("reads ", "quiet"), ", ".join(read))] if read else []
        calls = tuple(self.inside.get(cell, ()))
        lines += bars(call for call in calls if call.scope == "microbatch")
        once_a_step = bars(call for call in calls if call.scope != "microbatch")
        lines += [line((bar.text, "quiet")) for bar in once_a_step]
        lines += self._ties(cell)
        if program.loss_stage in stages:
            lines.append(line(("gives the loss", "bold")))
        fill = colours.RANKS[ranks[0] % len(colours.RANKS)]
        shape = "stack" if len(stages) > 1 else "box"
        tooltip = "\n".join([*_modules(program, stages), *call_lines(calls)])
        return Item(cell.id, tuple(lines), fill, colours.BORDER, shape, tooltip=tooltip, calls=calls)

    # links

    def _links(self) -> Iterator[Link]:
        """Yield a link for each two boxes where one reads values of the other."""
        read: dict[tuple[Cell, Cell], dict[CrossingSpec, None]] = {}
        for crossing in self.program.crossings:
            for target in crossing.targets:
                first, second = self.home.get(crossing.source), self.home.get(target)
                if first and second and first != second:
                    read.setdefault((first, second), {})[crossing] = None
        for (first, second), crossings in read.items():
            calls = tuple(self.between.get((first, second), ()))
            names = [f"{crossing.name} {list(crossing.shape)} {crossing.dtype}" for crossing in crossings]
            lines = [line((f"{len(names)} values", "quiet"))] if len(names) > 1 else []
            lines += [line(bar.text) for bar in bars(calls)] or [line("no message: both are on one rank")]
            if min(second.stages) > max(first.stages) + 1:
                # Otherwise the link would look like one of the stages between.
                between = list(range(max(first.stages) + 1, min(second.stages)))
                plural = "s" if len(between) > 1 else ""
                lines.append(line((f"passes by stage{plural} {_range(between)}", "quiet")))
            values = [f"{name}: {crossing.why}" for name, crossing in zip(names, crossings, strict=True)]
            tooltip = "\n".join([*values[:8], *call_lines(calls)])
            yield Link(
                first.id,
                second.id,
                colours.SENT,
                width=3.0,
                lines=tuple(lines),
                tooltip=tooltip,
                weight=0,
                calls=calls,
            )

    def _ties(self, cell: Cell) -> Iterator[Line]:
        """Yield the parameters of a box that others read too: `wte.weight: also read in stage 3`."""
        for spec in self.program.params:
            cells = dict.fromkeys(self.home[k] for k in spec.stages if k in self.home)
            if cell in cells and len(cells) > 1:
                others = _range([k for k in spec.stages if k not in cell.stages])
                name = ".".join(spec.name.split(".")[-2:])
                yield line((f"{name}: also read in stage {others}", "quiet"))

    def _legend(self) -> tuple[Item, ...]:
        """Return samples of the parts of this picture."""
        drawn: list[Collective] = []
        for calls in self.inside.values():
            drawn += calls
        samples = colours.legend_of_kinds(drawn)
        if self.program.crossings:
            samples.append(colours.sample("sent to another stage", border=colours.SENT, thick=2.0))
        return tuple(samples)


def find_cells(program: Program) -> list[Cell]:
    """Return the boxes of the grid, in the order of their stages."""
    columns, rows = _groups(program.mesh.p, RANKS_APART), _groups(program.v, CHUNKS_APART)
    cells: dict[tuple[int, int], list[int]] = {}
    for k in range(len(program.stages)):
        cells.setdefault((rows[program.chunk_of_stage(k)], columns[program.rank_of_stage(k)]), []).append(k)
    merged = [Cell(row, column, tuple(stages)) for (row, column), stages in cells.items()]
    return sorted(merged, key=lambda cell: cell.stages)


def _groups(count: int, apart: int) -> list[int]:
    """Return the group of every number below `count`: if there are many, all but the first and last two share one."""
    if count <= apart:
        return list(range(count))
    return [0, 1, *[2] * (count - 4), count - 2, count - 1]


def _peers(program: Program, stage: int) -> list[int]:
    """Return a stage and those that it talks to."""
    peers = {stage}
    for crossing in program.crossings:
        if crossing.source == stage:
            peers.update(crossing.targets)
        elif stage in crossing.targets:
            peers.add(crossing.source)
    return sorted(peers)


def _percent_text(share: float) -> str:
    return f"{share:.0f}" if share >= 10 else f"{share:.2g}"


def _modules(program: Program, stages: Sequence[int]) -> list[str]:
    """Return the modules whose parameters some stages use: `wte`, `h.0 ... h.2`."""
    layers: dict[str, list[int]] = {}
    for k in stages:
        for name in program.stages[k].params:
            match = re.match(r"((?:.*?\.)??)(\d+)\.", name)
            if match:
                layers.setdefault(match[1], []).append(int(match[2]))
            else:
                layers.setdefault(name.rpartition(".")[0] or name, [])
    names = []
    for prefix, numbers in layers.items():
        count = len(set(numbers))
        if count > 1:
            names.append(f"{prefix}{min(numbers)} ... {prefix}{max(numbers)} ({count} layers)")
        else:
            names.append(f"{prefix}{numbers[0]}" if numbers else prefix)
    return names


def _wrapped(words: Sequence[str], limit: int = 44, most: int = 4) -> list[str]:
    """Join words by commas, in at most `most` lines of `limit` letters."""
    lines = [""]
    for word in words:
        joined = f"{lines[-1]}, {word}" if lines[-1] else word
        if len(joined) > limit and lines[-1]:
            lines.append(word)
        else:
            lines[-1] = joined
    if len(lines) <= most:
        return lines
    return [*lines[: most - 1], f"and {len(lines) - most + 1} lines of names more"]


def _span(values: Sequence[float], text: Callable[[float], str]) -> str:
    """`14.2 M`, or `3 M to 14.2 M`."""
    low, high = text(min(values)), text(max(values))
    return low if low == high else f"{low} to {high}"


def _range(numbers: Sequence[int]) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} ... {numbers[-1]}"
