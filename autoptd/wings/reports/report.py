"""Write one page about a program: numbers, pictures, tables, decisions, files, and measurements of a recorded step.

In: a `Program`, and the `Record` of one step if there is one. Out: `report.html`, a single file that needs no network.

    with pm.record() as record:
        pm.step(x, y)
    write_report(pm.program, "out/report.html", record=record)
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from autoptd.ir.actions import Kind
from autoptd.ir.mesh import base
from autoptd.ir.names import star
from autoptd.ir.types import ALIGNED, LOCAL_KINDS, MIN_ALIGNED, aligned, wire_bytes
from autoptd.program.calls import Call, call_site, expected_calls
from autoptd.program.program import Picture, Program
from autoptd.program.specs import ParamSpec
from autoptd.runtime.measure.record import Record
from autoptd.wings.reports.collectives import collectives_markdown
from autoptd.wings.reports.page import (
    Tab,
    folded,
    heading,
    markdown_html,
    page,
    paragraph,
    python_html,
    source,
    table,
    tiles,
    viewer,
)
from autoptd.wings.reports.pictures import executed_run, simulated_run
from autoptd.wings.reports.summary import (
    RankCosts,
    Summary,
    summarize,
    traffic_row,
    weighed_heading,
    weighed_table,
)
from autoptd.wings.viz import Run, graph_picture, schedule_svg
from autoptd.wings.words import bytes_text, count_text, plural, seconds_text

# With more operators in a stage, or more stages, they are not drawn in full.
MAX_DRAWN_OPERATORS, MAX_DRAWN_STAGES = 600, 4


def write_report(
    program: Program,
    path: str | Path,
    name: str = "",
    record: Record | None = None,
    plain_seconds: float | None = None,
) -> None:
    """Write the page: `name` of the model, `record` of one training step, seconds of a step without recording."""
    Path(path).write_text(
        report_html(program, name, record, plain_seconds), encoding="utf-8", errors="backslashreplace"
    )


def report_html(
    program: Program, name: str = "", record: Record | None = None, plain_seconds: float | None = None
) -> str:
    """Return the page."""
    summary = summarize(program)
    runs = [simulated_run(program)]
    if record:
        runs.append(executed_run(program, record.spans))
    tabs = [
        Tab("Summary", _summary(program, summary)),
        Tab("Stages", _stages(program, summary)),
        Tab("Layers", _layers(program)),
        Tab("Schedule", _schedule(program, runs)),
        # Without the title.
        Tab("Communication", markdown_html(collectives_markdown(program).partition("\n")[2])),
        Tab("Decisions", _decisions(program)),
        Tab("Files", _files(program)),
    ]
    if record:
        tabs.insert(1, Tab("Measured", _measured(program, record, runs, plain_seconds)))
    mesh = program.mesh
    ranks = plural(mesh.size, "rank")
    about = f"{ranks}: {mesh.words}, v={program.v}"
    return page(f"{name or 'A model'} on {ranks}", f"{about}; written by AutoPTD", tabs)


def _summary(program: Program, summary: Summary) -> str:
    fullest = max(rank.total_bytes for rank in summary.ranks)
    # A program written by hand has no seconds.
    share = summary.idle_seconds / summary.step_seconds if summary.step_seconds else 0.0
    m = summary.num_microbatches
    shown = [
        (count_text(summary.parameters), "parameters"),
        (bytes_text(fullest), "on the fullest rank"),
        (count_text(summary.model_flops, "FLOP"), "matrix products of a step"),
        (f"{share:.1%}", "bubble, of the simulated step"),
        (str(m * summary.rows * summary.mesh.replicas), "samples a step"),
    ]
    columns = "pipeline rank,stages,parameters,bytes,gradients,optimizer,activations,total,work,computes"
    sent = [traffic_row(traffic) for traffic in summary.traffic]
    sent_names = ("over", "calls", "bytes", "links", "time alone", "most on pipeline rank")
    parts = [
        tiles(shown),
        heading("What a rank holds and does in a step"),
        table(columns.split(","), [_rank_row(rank) for rank in summary.ranks], range(2, 10)),
        paragraph(
            "AdamW: gradients and both moments in the parameter's dtype. Activations: saved activations of the "
            "microbatches in flight, at the peak of the simulated schedule. Allocator, libraries and communicators are not "
            "included."
        ),
        *map(paragraph, summary.remarks),
        heading("What a rank sends in a step"),
        table(sent_names, sent, (1, 2, 4, 5)) if sent else paragraph("Nothing."),
        paragraph(
            f"Schedule `{summary.schedule}`, {plural(m, 'microbatch')} of size {summary.rows} per replica. "
            f"The pipeline takes {seconds_text(summary.step_seconds)} by the cost model for {summary.machine}; the "
            f"busiest rank is idle for {seconds_text(summary.idle_seconds)} of it. These seconds are predicted, not measured."
        ),
    ]
    return "\n".join(parts)


def _rank_row(rank: RankCosts) -> tuple[str, ...]:
    nbytes = (rank.parameter_bytes, rank.gradient_bytes, rank.optimizer_bytes, rank.activation_bytes)
    return (
        f"{rank.pipeline_rank}",
        ", ".join(map(str, rank.stages)),
        count_text(rank.parameters),
        *map(bytes_text, nbytes),
        bytes_text(rank.total_bytes),
        count_text(rank.flops, "FLOP"),
        seconds_text(rank.seconds),
    )


def _stage_row(program: Program, stage: int) -> tuple[str, ...]:
    cut, costs = program.costs.cut, program.costs
    # A tied parameter counts in every stage that uses it.
    wanted = set(program.stages[stage].params)
    specs = [spec for spec in program.params if spec.name in wanted]
    held = sum(math.prod(spec.local_shape(program.mesh)) for spec in specs)
    sent = sum(buffer.sent_bytes for buffer in program.transfers if buffer.source == stage)
    return (
        f"{stage}",
        str(program.rank_of_stage(stage)),
        str(program.chunk_of_stage(stage)),
        count_text(held),
        count_text(costs.flops_per_stage[stage], "FLOP"),
        count_text(costs.backward_flops_per_stage[stage], "FLOP"),
        seconds_text(cut.seconds[stage]) if cut.seconds else "",
        bytes_text(cut.saved_bytes[stage]) if cut.saved_bytes else "",
        bytes_text(sent),
        cut.after[stage] if stage < len(cut.after) else "the end",
    )


def _stages(program: Program, summary: Summary) -> str:
    columns = "stage,pipeline rank,chunk,parameters,forward,backward,seconds,saved,sends,cut after"
    names = columns.split(",")
    rows = [_stage_row(program, stage) for stage in range(len(program.stages))]
    return "\n".join(
        [
            _drawn(graph_picture(program, "model"), "the stages"),
            heading("For one rank and one microbatch"),
            table(names, rows, range(1, 9)),
            paragraph(
                f"Cut {program.costs.cut.why}. Saved: saved activations. Sends: values and gradients to other stages."
            ),
        ]
    )


def _drawn(drawn: Picture, name: str) -> str:
    return (
        viewer(drawn.svg, f"picture of {name}") if drawn.svg else paragraph(f"No picture: {drawn.why_not}.")
    )


def _layers(program: Program) -> str:
    parts = []
    if program.graphs:
        parts.append(_drawn(graph_picture(program, "layer"), "the operators"))
        for stage in range(len(program.stages)):
            count = sum(line.file in (f"stage_{stage}.py", "layers.py") for line in program.lines)
            # Pictures of thousands of nodes are slow in a browser, and not readable.
            if count > MAX_DRAWN_OPERATORS or len(program.stages) > MAX_DRAWN_STAGES:
                continue
            full = graph_picture(program, "full", stage).svg
            if full:
                title = f"Stage {stage}, every operator"
                parts.append(folded(title, "", viewer(full, f"picture of {title}")))
    parts.append(heading("Module by module"))
    parts += module_sections(program)
    return "\n".join(parts)


def _schedule(program: Program, runs: list[Run]) -> str:
    title = (
        f"{program.schedule_name}, p={program.mesh.pipeline_ranks} v={program.v} m={program.num_microbatches}"
    )
    orders = program.schedule.splitlines()
    # 64 ranks show the pattern.
    text = folded("As text", "what each pipeline rank does", source("\n".join(orders[:64]) + "\n"))
    remark = paragraph("The same as a trace: `trace.json` next to this page, for ui.perfetto.dev.")
    chart = viewer(schedule_svg(runs, program.orders, title=title), "chart of the schedule")
    return "\n".join([chart, remark, text])


def _decisions(program: Program) -> str:
    parts: list[str] = []
    if weighed := program.plan.get("weighed"):
        names, rows = weighed_table(weighed)
        parts += [
            heading(weighed_heading(program.mesh)),
            paragraph(f"{weighed['found']}."),
            table(names, rows, range(1, len(names))),
        ]
    parts += [
        heading(f"Operators that {program.mesh.value_text} does not split as expected"),
        _fallbacks(program),
    ]
    if program.fusions:
        parts += [heading("Fused operators, and reasons against fusion"), _fusions(program)]
    if program.unlisted:
        parts += [heading("Operators without a rule in AutoPTD"), *map(paragraph, program.unlisted)]
    if odd := odd_products(program):
        parts += [heading("Products that a GPU's aligned kernels do not support"), *map(paragraph, odd)]
    cut = program.costs.cut
    parts += [
        heading("Where the model is cut"),
        paragraph(f"After {_listed(cut.after)}: {cut.why}."),
    ]
    kinds = Counter(buffer.why for buffer in program.transfers)
    if kinds:
        parts += [heading("How values travel between stages")]
        parts.append(table(("x", "way"), [(str(count), why) for why, count in kinds.items()], (0,)))
    options = program.plan.get("options", {})
    parts += [
        heading("Options"),
        table(("option", "value"), [(key, str(value)) for key, value in options.items()]),
    ]
    return "\n".join(parts)


def _fallbacks(program: Program) -> str:
    rows = []
    for entry in program.plan.get("fallbacks", []):
        flops = count_text(entry["flops"])
        rows.append((entry["op"], entry["site"] or "the model", entry["fact"], entry["remedy"], flops))
    if not rows:
        return paragraph("None: every operator is split as expected.")
    names = ("operator", "in", "fact", "remedy", "FLOPs that every tensor rank repeats")
    return table(names, rows, (4,))


def _fusions(program: Program) -> str:
    rows = []
    for fusion in program.fusions:
        # `why` is empty if the pattern was replaced.
        result = fusion.why or f"fused, {fusion.form}".removesuffix(", ")
        rows.append((fusion.op, fusion.site or "the model", str(fusion.times), result))
    return table(("operator", "in", "x", "result"), rows, (2,))


def odd_products(program: Program) -> list[str]:
    """Describe large matrix products with rows that do not start at 16 bytes in 16 bits: a head of 50,257 classes."""
    kind_of = {row.sizes: row.kind for row in program.costs.products}
    remarks = []
    # (batch, m, n, k): rows of operands and result are n or k long.
    for (_, _, *lengths), kind in kind_of.items():
        for length in lengths:
            if length >= MIN_ALIGNED and length % 8:
                fact = f"A {kind} has rows of {length:,} elements, which is not a multiple of 8."
                remedy = f"Pad to {ALIGNED} in the model: {aligned(length):,}, the last of them unused."
                remarks.append(f"{fact} {remedy}")
    return list(dict.fromkeys(remarks))


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "nothing"


def _files(program: Program) -> str:
    files = (
        "one file per stage, the same on every tensor and data rank; layers.py has the code that stages share"
    )
    parts = [paragraph(f"The program: {files}.")]
    for name, text in program.sources.items():
        count = text.count("\n")
        parts.append(folded(name, f"{count} lines", source(python_html(text)), is_open=name == "stage_0.py"))
    return "\n".join(parts)


def _measured(program: Program, record: Record, runs: list[Run], plain_seconds: float | None) -> str:
    simulated, executed = runs
    rows: list[tuple[str, ...]] = [
        ("step, all microbatches", seconds_text(simulated.length), seconds_text(executed.length)),
    ]
    if plain_seconds is not None:
        rows.append(("a step without recording", "", seconds_text(plain_seconds)))
    # Under torchrun a process records only its own rank.
    if executed.is_whole:
        bubbles = (f"{run.bubble:.1%}" for run in runs)
        rows.append(("bubble (idle over the busiest rank's work)", *bubbles))
    for stage in range(len(program.stages)):
        for kind, name in ((Kind.F, "forward"), (Kind.B, "backward"), (Kind.W, "weight gradients")):
            predicted, measured = (_mean(run, stage, kind) for run in runs)
            if measured is not None:
                times = seconds_text(predicted or 0.0), seconds_text(measured)
                rows.append((f"stage {stage}, {name} of a microbatch", *times))
    # Unlike times, calls must be equal.
    equal, call_rows = True, []
    for key, pair in _call_rows(program, record):
        compiled, recorded = pair
        equal = equal and compiled == recorded
        call_rows.append((key, *(f"{count} x, {bytes_text(sent)} sent" for count, sent in pair)))
    table_of_calls = table(("kind", "predicted", "measured"), call_rows)
    verdict = "They DIFFER: the record is not of one training step."
    if equal:
        verdict = "Equal: the ranks executed the compiled program."
    return "\n".join(
        [
            paragraph(f"Predicted: {simulated.remark}. Measured: {executed.remark}."),
            table(("", "predicted", "measured"), rows, (1, 2)),
            heading("Collectives and sends of the recorded ranks"),
            paragraph(verdict),
            table_of_calls,
        ]
    )


def _mean(run: Run, stage: int, kind: Kind) -> float | None:
    """Return the mean time of a computation of a stage over microbatches; None if there is none."""
    times = []
    for row in run.spans:
        for action, start, end in row:
            if (action.stage, action.kind) == (stage, kind):
                times.append(end - start)
    return sum(times) / len(times) if times else None


def _call_rows(program: Program, record: Record) -> Iterator[tuple[str, tuple[tuple[int, float], ...]]]:
    """Yield (times, bytes sent) as compiled and as recorded, per axis and kind (`tp all-reduce`)."""
    # Objects (such as checks of the batch) and evaluations are not part of the compiled step.
    recorded = [call for call in record.collectives if call.kind != "objects" and call.phase != "evaluation"]
    sums: dict[str, list[list[float]]] = {}

    def count(side: int, call: Call, times: int) -> None:
        entry = sums.setdefault(f"{call.axis} {call.kind}", [[0, 0.0], [0, 0.0]])[side]
        entry[0] += times
        entry[1] += times * wire_bytes(call.kind, call.payload_bytes, call.group_size)

    # Threads are all recorded, under torchrun only one rank.
    for rank in sorted({call.rank for call in recorded}):
        for call, times in expected_calls(program, rank).items():
            count(0, call, times)
    for call in recorded:
        count(1, call, 1)
    for key, pair in sorted(sums.items()):
        yield key, tuple((int(times), nbytes) for times, nbytes in pair)


def module_sections(program: Program) -> list[str]:
    """Return a section for each module with parameters or matrix products."""
    return [_module(program, name) for name in _modules(program)]


def _modules(program: Program) -> list[str]:
    """Return the modules with parameters or matrix products, equal layers as one, in the order of the model."""
    # "h.3.mlp.c_fc.weight" belongs to "h.*.mlp.c_fc".
    named = [star(spec.name.rpartition(".")[0]) for spec in program.params]
    return list(dict.fromkeys([*named, *(row.module for row in program.costs.gemms)]))


def _module(program: Program, name: str) -> str:
    params = [spec for spec in program.params if star(spec.name.rpartition(".")[0]) == name]
    times = Counter(star(spec.name) for spec in params)
    # All layers share a row, unless their types differ.
    alike: dict[tuple[str, str], ParamSpec] = {}
    for spec in params:
        alike.setdefault((star(spec.name), spec.type_text()), spec)
    rows = []
    for spec in alike.values():
        shapes = _shape(spec.shape), _shape(spec.local_shape(program.mesh))
        own = spec.name.rpartition(".")[2]
        rows.append((own, *shapes, spec.type_text(), ", ".join(spec.aliases[1:]), spec.why))
    body = []
    if rows:
        heads = (
            "parameter",
            "shape",
            "local shape",
            f"type over {program.mesh.value_text}",
            "tied to",
            "why",
        )
        body.append(table(heads, rows))
    gemms = [row for row in program.costs.gemms if row.module == name]
    if gemms:
        work = Counter[str]()
        for row in gemms:
            work[row.operator.removeprefix("aten.")] += row.forward + row.backward
        products = ", ".join(f"`{operator}` {count_text(flops, 'FLOP')}" for operator, flops in work.items())
        fact = "Matrix products of a rank and a microbatch, forward and backward, in all layers"
        body.append(paragraph(f"{fact}: {products}."))
    calls = _calls_of(program, name)
    if calls:
        over = ", ".join((*program.mesh.value_axes, *program.busy_axes))
        names = ("x", f"collective over {over}", "in", "payload", "why")
        body.append(table(names, [(str(count), *key) for key, count in calls.items()], (0, 3)))
    # The number of layers: those that share a parameter's name.
    count = max(times.values(), default=1)
    return folded(name or "the model", f"x {count}" if count > 1 else "", "\n".join(body))


def _calls_of(program: Program, name: str) -> Counter[tuple[str, str, str, str]]:
    """Count the collectives of a module, by kind, phase, payload and reason."""
    calls = Counter[tuple[str, str, str, str]]()
    for call in program.collectives:
        # Gradient sums and messages between stages do not belong to modules.
        if (
            base(call.axis) not in (*program.mesh.value_axes, *program.busy_axes)
            or call.scope != "microbatch"
            or call_site(call) != name
        ):
            continue
        for phase, kind in (("forward", call.forward), ("backward", call.backward)):
            if kind not in LOCAL_KINDS:
                calls[kind, phase, bytes_text(call.payload_bytes), star(call.why)] += 1
    return calls


def _shape(size: tuple[int, ...]) -> str:
    return "x".join(map(str, size)) or "one number"
