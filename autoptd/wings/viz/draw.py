"""Write what people look at into a folder: pictures of the graph and of the schedule, a trace, the table of
collectives.

In: a `Program` and `Run`s of a step. Out: `stages.svg` (what the stages send each other), `graph.svg` (the
operators), both as .dot too; `schedule.svg`, `trace.json`, `collectives.md`. A program that was loaded from
disk has no graphs: its `graph.*` files are left as they are. The .svg of graphs are left out where graphviz
cannot be loaded.

    draw(program, Path("out"), [Run("simulated", simulate(program.orders).spans)])
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from autoptd.program.program import Picture, Program
from autoptd.wings.viz.collectives import collectives_markdown
from autoptd.wings.viz.picture import graph_picture
from autoptd.wings.viz.runs import Run
from autoptd.wings.viz.schedule_chart import schedule_svg
from autoptd.wings.viz.trace_file import trace_json


def draw(program: Program, folder: Path, runs: Sequence[Run]) -> None:
    """Write the pictures and the table of `program` to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    _write(graph_picture(program, "model"), folder / "stages")
    # A loaded program has no graphs, and what it drew when it was compiled may still be right.
    if program.graphs:
        _write(graph_picture(program, "layer"), folder / "graph")
    title = f"{program.schedule_name}, p={program.mesh.p} v={program.v} m={program.num_microbatches}"
    (folder / "schedule.svg").write_text(schedule_svg(runs, program.orders, title=title))
    (folder / "trace.json").write_text(trace_json(runs, program.orders))
    (folder / "collectives.md").write_text(collectives_markdown(program), encoding="utf-8")


def _write(picture: Picture, path: Path) -> None:
    picture.save(path.with_suffix(".dot"))
    if picture.svg is None:
        # One of an earlier program would be wrong.
        path.with_suffix(".svg").unlink(missing_ok=True)
    else:
        picture.save(path.with_suffix(".svg"))
