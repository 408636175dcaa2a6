"""Write what people look at into a folder: `graph.dot`, `graph.svg`, `schedule.svg`, `collectives.md`.

In: a `Program` and the spans of its simulated schedule, as plain data. A program that was loaded from disk has no graphs:
its `graph.*` files are left as they are. `graph.svg` is left out where graphviz cannot be loaded.

    result = simulate(program.orders)
    draw(program, Path("out"), result.spans, bubble=result.bubble, peak_live=result.peak_live)
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from autoptd.ir.program import Program
from autoptd.viz.collectives import collectives_markdown
from autoptd.viz.picture import graph_picture
from autoptd.viz.schedule_chart import Spans, schedule_svg


def draw(
    program: Program, folder: Path, spans: Spans, *, bubble: float | None = None, peak_live: Sequence[int] = ()
) -> None:
    """Write the pictures and the table of `program` to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    if "LOCAL" in program.graphs:
        dot = graph_dot(program)
        (folder / "graph.dot").write_text(dot)
        svg = graph_svg(dot)
        if svg is None:
            (folder / "graph.svg").unlink(missing_ok=True)  # one of an earlier program would be wrong
        else:
            (folder / "graph.svg").write_text(svg)
    title = f"{program.schedule_name}, p={program.mesh.p} v={program.v} m={program.num_microbatches}"
    chart = schedule_svg(spans, title=title, bubble=bubble, peak_live=peak_live)
    (folder / "schedule.svg").write_text(chart)
    (folder / "collectives.md").write_text(collectives_markdown(program))
