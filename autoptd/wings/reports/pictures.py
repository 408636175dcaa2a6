"""What the pictures of a program are drawn from: its simulated step, and a recorded one.

In: a `Program`, and the spans of a record if there is one. Out: `Run`s, and the files of `wings/viz/draw.py`.

    with pm.record() as record:
        pm.step(x, y)
    # schedule.svg: simulated, and below it what was executed
    draw_program(pm.program, Path("out"), record.spans)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from autoptd import schedule as schedules
from autoptd.ir.actions import Action, Kind
from autoptd.passes.runner import Dump
from autoptd.program.program import Program
from autoptd.runtime.step.timeline import Span
from autoptd.wings import viz

# The simulation wants times above 0.
MIN_SECONDS = 1e-12


def draw_program(program: Program, folder: Path | None, spans: Sequence[Span] = ()) -> viz.Picture:
    """Return the picture of a program's graph; write that, all forms of the graph and the charts into `folder` if given.

    `spans` of a record are drawn next to the simulated step.
    """
    if folder is not None:
        dump = Dump(folder)
        for form, graph in program.graphs.items():
            dump.add(form.lower(), graph)
        runs = [simulated_run(program), *([executed_run(program, spans)] if spans else [])]
        viz.draw(program, folder, runs)
    return viz.graph_picture(program, "layer" if program.graphs else "model")


def simulated_run(program: Program) -> viz.Run:
    """Simulate the step by the seconds of the cost model, of which `_parts` says what is forward; messages take no time.

    Without them (a program written by hand) a forward takes 1.
    """
    seconds = program.costs.cut.seconds
    if not seconds:
        return _run("simulated", program, schedules.simulate(program.orders).spans, False, "")
    times = [max(time, MIN_SECONDS) for time in seconds]
    forward, inputs, weights = [], [], []
    for time, part in zip(times, _parts(program), strict=True):
        forward.append(time * part[0] / sum(part))
        inputs.append(time * part[1] / sum(part))
        weights.append(max(time * part[2] / sum(part), MIN_SECONDS / 2))
    # To make values again takes backward more.
    again = program.costs.cut.again_seconds or [0.0] * len(times)
    backward = [max(sum(each), MIN_SECONDS) for each in zip(inputs, weights, again, strict=True)]
    result = schedules.simulate(program.orders, forward=forward, backward=backward, weight_gradient=weights)
    machine = program.plan.get("options", {}).get("machine") or "the default machine"
    remark = f"stages take the time that the cost model gives them on {machine}, messages between them none"
    return replace(_run("simulated", program, result.spans, True, remark), again=again)


def _parts(program: Program) -> list[tuple[int, int, int]]:
    """Return how forward, the gradients of inputs, and those of weights divide the seconds of each stage.

    All are alike, but where parameters are frozen: there the products say it.
    """
    costs = program.costs
    if all(spec.requires_grad for spec in program.params):
        return [(1, 1, 1)] * len(costs.cut.seconds)
    work = zip(costs.flops_per_stage, costs.backward_flops_per_stage, strict=True)
    # Backward of an attention's kernel makes scores again, which are no weights'.
    parts = [
        (forward, min(forward, backward), min(max(backward - forward, 0), forward))
        for forward, backward in work
    ]
    return [part if any(part) else (1, 1, 1) for part in parts]


def executed_run(program: Program, spans: Sequence[Span]) -> viz.Run:
    """Return the recorded step of the first replica's first tensor ranks; spans of other ranks are left out.

    A process under torchrun records its own rank alone: the rows of the others are empty.
    """
    mesh = program.mesh
    rows: list[list[tuple[Action, float, float]]] = [[] for _ in range(mesh.pipeline_ranks)]
    for rank, action, start, end in spans:
        place = mesh.pipeline_rank_of(rank)
        # Rank 0's pipeline stands for the others.
        if rank == mesh.at_stage(0, place):
            rows[place].append((action, start, end))
    recorded = [str(mesh.at_stage(0, place)) for place, row in enumerate(rows) if row]
    ranks = ", ".join(recorded[:8]) + (", ..." if len(recorded) > 8 else "")
    plural = "s" if len(recorded) > 1 else ""
    remark = f"recorded on rank{plural} {ranks}; recording takes time as well"
    return _run("executed", program, rows, True, remark)


def _run(
    name: str,
    program: Program,
    spans: Sequence[Sequence[tuple[Action, float, float]]],
    in_seconds: bool,
    remark: str,
) -> viz.Run:
    """Make a run with what its ranks hold: bytes that a stage saves for backward, where the costs have
    them.
    """
    saved = program.costs.cut.saved_bytes
    memory = [_held(row, saved or [1.0] * len(program.stages)) for row in spans]
    return viz.Run(name, spans, in_seconds, memory, bool(saved), remark)


def _held(row: Sequence[tuple[Action, float, float]], sizes: Sequence[float]) -> list[tuple[float, float]]:
    """Return what a rank holds after every change: a microbatch's share from its F to its B (or its W)."""
    # A deferred weight gradient still needs the layer's input: it is held until the W.
    last = Kind.W if any(action.kind is Kind.W for action, _, _ in row) else Kind.B
    held, points = 0.0, []
    for action, start, end in row:
        # Memory is taken when a forward begins, and free when the last backward ends.
        if action.kind is Kind.F:
            held += sizes[action.stage]
            points.append((start, held))
        elif action.kind is last:
            held -= sizes[action.stage]
            points.append((end, held))
    return points


__all__ = ["draw_program", "executed_run", "simulated_run"]
