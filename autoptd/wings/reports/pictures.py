"""Draw a program: its graph, and its step over time, simulated and recorded.

In: a `Program`, and the spans of a record if there is one. Out: a picture, and the files of a folder: `stages` (what
the stages send each other) and `graph` (the operators), as .svg and .dot, `schedule.svg`, `trace.json`,
`collectives.md`, and a text for every form of the graph.

    with pm.record() as record:
        pm.step(x, y)
    # schedule.svg: simulated, and below it the executed step
    draw_program(pm.program, Path("out"), record.spans)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from autoptd.ir.actions import Action, Kind
from autoptd.passes.runner import Dump
from autoptd.program.program import Picture, Program
from autoptd.runtime.step.timeline import Span
from autoptd.schedule.simulate import simulate
from autoptd.wings.reports.collectives import collectives_markdown
from autoptd.wings.viz.picture import graph_picture
from autoptd.wings.viz.runs import Run, trace_json
from autoptd.wings.viz.runs import Span as Timed
from autoptd.wings.viz.schedule_chart import schedule_svg

# The simulation needs positive times.
MIN_SECONDS = 1e-12


def draw_program(program: Program, folder: Path | None, spans: Sequence[Span] = ()) -> Picture:
    """Return the picture of a program's graph; with `folder`, write all files there.

    `spans` of a record are drawn below the simulated step. A loaded program has no graphs: its `graph.*` files are
    left alone, as those that it drew when it was compiled may still be right. Without graphviz there is no .svg of a
    graph.
    """
    picture = graph_picture(program, "layer" if program.graphs else "model")
    if folder is None:
        return picture
    dump = Dump(folder)
    for form, graph in program.graphs.items():
        dump.add(form.lower(), graph)
    _write(graph_picture(program, "model"), folder / "stages")
    if program.graphs:
        _write(picture, folder / "graph")
    runs = [simulated_run(program), *([executed_run(program, spans)] if spans else [])]
    title = (
        f"{program.schedule_name}, p={program.mesh.pipeline_ranks} v={program.v} m={program.num_microbatches}"
    )
    (folder / "schedule.svg").write_text(schedule_svg(runs, program.orders, title=title))
    (folder / "trace.json").write_text(trace_json(runs, program.orders))
    (folder / "collectives.md").write_text(collectives_markdown(program), encoding="utf-8")
    return picture


def _write(picture: Picture, path: Path) -> None:
    picture.save(path.with_suffix(".dot"))
    if picture.svg is None:
        # One of an earlier program would be wrong.
        path.with_suffix(".svg").unlink(missing_ok=True)
    else:
        picture.save(path.with_suffix(".svg"))


def simulated_run(program: Program) -> Run:
    """Simulate the step with the cost model's seconds; messages take no time.

    Without seconds (a program written by hand), a forward takes 1.
    """
    cut = program.costs.cut
    if not cut.seconds:
        return _run("simulated", program, simulate(program.orders).spans, False, "")
    # Recomputation lengthens the backward.
    again = cut.again_seconds or [0.0] * len(cut.seconds)
    forward, backward, weights = [], [], []
    for seconds, part, extra in zip(cut.seconds, _parts(program), again, strict=True):
        of_forward, of_inputs, of_weights = (max(seconds, MIN_SECONDS) * share / sum(part) for share in part)
        forward.append(of_forward)
        weights.append(max(of_weights, MIN_SECONDS / 2))
        backward.append(max(of_inputs + weights[-1] + extra, MIN_SECONDS))
    result = simulate(program.orders, forward=forward, backward=backward, weight_gradient=weights)
    machine = program.plan.get("options", {}).get("machine") or "the default machine"
    remark = f"stages take the time that the cost model gives them on {machine}, messages between them none"
    return replace(_run("simulated", program, result.spans, True, remark), again=again)


def _parts(program: Program) -> list[tuple[int, int, int]]:
    """Return, by stage, the ratio of seconds of forward, input gradients and weight gradients.

    They take equally long, unless parameters are frozen: then the FLOPs of the products decide.
    """
    costs = program.costs
    if all(spec.requires_grad for spec in program.params):
        return [(1, 1, 1)] * len(costs.cut.seconds)
    parts = []
    for forward, backward in zip(costs.flops_per_stage, costs.backward_flops_per_stage, strict=True):
        # The backward of fused attention recomputes scores, which belongs to no weight.
        part = (forward, min(forward, backward), min(max(backward - forward, 0), forward))
        parts.append(part if any(part) else (1, 1, 1))
    return parts


def executed_run(program: Program, spans: Sequence[Span]) -> Run:
    """Return the recorded step of the first replica's first tensor ranks.

    A process under torchrun records only its own rank: the rows of the others are empty.
    """
    mesh = program.mesh
    rows: list[list[Timed]] = [[] for _ in range(mesh.pipeline_ranks)]
    for rank, action, start, end in spans:
        place = mesh.pipeline_rank_of(rank)
        # Rank 0's pipeline stands for the others.
        if rank == mesh.at_stage(0, place):
            rows[place].append((action, start, end))
    recorded = [str(mesh.at_stage(0, place)) for place, row in enumerate(rows) if row]
    ranks = ", ".join(recorded[:8]) + (", ..." if len(recorded) > 8 else "")
    plural = "s" if len(recorded) > 1 else ""
    return _run(
        "executed", program, rows, True, f"recorded on rank{plural} {ranks}; recording takes time as well"
    )


def _run(name: str, program: Program, spans: Sequence[Sequence[Timed]], in_seconds: bool, remark: str) -> Run:
    """Return a run with the memory of its ranks: the bytes that stages save, or else their number."""
    saved = program.costs.cut.saved_bytes
    memory = [_held(row, saved or [1.0] * len(program.stages)) for row in spans]
    return Run(name, spans, in_seconds, memory, bool(saved), remark)


def _held(row: Sequence[tuple[Action, float, float]], sizes: Sequence[float]) -> list[tuple[float, float]]:
    """Return the memory of a rank after every change: a microbatch's share from its F to its B (or its W)."""
    # A deferred weight gradient still needs the layer's input.
    last = Kind.W if any(action.kind is Kind.W for action, _, _ in row) else Kind.B
    held, points = 0.0, []
    for action, start, end in row:
        # Memory is allocated when a forward begins, and freed when the last backward ends.
        if action.kind is Kind.F:
            held += sizes[action.stage]
            points.append((start, held))
        elif action.kind is last:
            held -= sizes[action.stage]
            points.append((end, held))
    return points
