"""One page about a program: numbers, pictures, tables, decisions, files; and what was measured, where a run was recorded.

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

from autoptd.ir.actions import COMPUTES, Kind
from autoptd.ir.sub_axes import base
from autoptd.ir.types import ALIGNED, LEAST_ALIGNED, aligned
from autoptd.program.calls import LOCAL_KINDS, Call, call_site, expected_calls, star, wire_bytes
from autoptd.program.program import Picture, Program
from autoptd.program.specs import ParamSpec
from autoptd.reports.pictures import executed_run, simulated_run
from autoptd.reports.summary import AXES, WEIGHED, Summary, seconds_text, summarize, weighed_table
from autoptd.runtime.record import Record
from autoptd.viz import Run, graph_picture, schedule_svg
from autoptd.viz.collectives import collectives_markdown
from autoptd.viz.highlight import python_html
from autoptd.viz.page import Tab, folded, heading, markdown_html, page, paragraph, picture, source, table, tiles
from autoptd.viz.words import bytes_text, count_text

LARGEST = 600  # operators of a stage of which a picture is drawn in full


def write_report(program: Program, path: str | Path, name: str = "", record: Record | None = None) -> None:
    """Write the page; `name` is the model's, `record` that of one training step."""
    Path(path).write_text(report_html(program, name, record))


def report_html(program: Program, name: str = "", record: Record | None = None) -> str:
    """Return the page."""
    summary = summarize(program)
    runs = [simulated_run(program), *([executed_run(program, record.spans)] if record else [])]
    tabs = [
        Tab("Summary", _summary(program, summary)),
        Tab("Stages", _stages(program, summary)),
        Tab("Layers", _layers(program)),
        Tab("Schedule", _schedule(program, runs)),
        Tab("Communication", markdown_html(collectives_markdown(program).partition("\n")[2])),
        Tab("Decisions", _decisions(program)),
        Tab("Files", _files(program)),
    ]
    if record:
        tabs.insert(1, Tab("Measured", _measured(program, record, runs)))
    mesh = program.mesh
    ranks = f"{mesh.size} rank{'s'[: mesh.size > 1]}"
    about = f"{ranks}: t={mesh.t} tensor x p={mesh.p} pipeline x d={mesh.d} data parallel, v={program.v}"
    return page(f"{name or 'A model'} on {ranks}", f"{about}; written by AutoPTD", tabs)


def _summary(program: Program, one: Summary) -> str:
    fullest = max(rank.total_bytes for rank in one.ranks)
    share = one.idle_seconds / one.step_seconds if one.step_seconds else 0.0
    shown = [
        (count_text(one.parameters), "parameters"),
        (bytes_text(fullest), "on the fullest rank"),
        (f"{count_text(one.model_flops)}FLOP", "matrix products of a step"),
        (f"{share:.1%}", "bubble, of the simulated step"),
        (str(one.num_microbatches * one.rows * one.mesh.d), "rows a step"),
    ]
    memory = [
        (
            f"{rank.pp}",
            ", ".join(map(str, rank.stages)),
            count_text(rank.parameters),
            *map(bytes_text, (rank.parameter_bytes, rank.gradient_bytes, rank.optimizer_bytes, rank.activation_bytes)),
            bytes_text(rank.total_bytes),
            f"{count_text(rank.flops)}FLOP",
            seconds_text(rank.seconds),
        )
        for rank in one.ranks
    ]
    columns = "pipeline rank,stages,parameters,bytes,gradients,optimizer,activations,total,work,computes".split(",")
    sent = [
        (
            f"{two.axis} ({AXES[two.axis]} parallel)",
            str(two.calls),
            bytes_text(two.sent_bytes),
            "between nodes" if two.is_between_nodes else "within a node",
            seconds_text(two.seconds),
            str(two.pp),
        )
        for two in one.traffic
    ]
    return "\n".join(
        [
            tiles(shown),
            heading("What a rank holds and does in a step"),
            table(columns, memory, range(2, 10)),
            paragraph(
                "AdamW: gradients and both moments in the parameter's dtype. Activations: what backward keeps of the "
                "microbatches in flight, at the fullest moment of the simulated schedule. Allocator, libraries and "
                "communicators come on top."
            ),
            *map(paragraph, one.remarks),
            heading("What a rank sends in a step"),
            table(("over", "calls", "bytes", "links", "alone takes", "most on pipeline rank"), sent, (1, 2, 4, 5))
            if sent
            else paragraph("Nothing."),
            paragraph(
                f"Schedule `{one.schedule}`, {one.num_microbatches} microbatch{'es' if one.num_microbatches > 1 else ''} of "
                f"{one.rows} row{'s'[: one.rows > 1]} per replica. The pipeline "
                f"takes {seconds_text(one.step_seconds)} as the cost model has it for {one.machine}; the busiest rank waits "
                f"{seconds_text(one.idle_seconds)} of it. None of these seconds was measured."
            ),
        ]
    )


def _stages(program: Program, summary: Summary) -> str:
    cut, costs = program.costs.cut, program.costs
    names = (
        "stage",
        "pipeline rank",
        "chunk",
        "parameters",
        "forward",
        "backward",
        "seconds",
        "saved",
        "sends",
        "cut behind",
    )
    rows = []
    for stage in range(len(program.stages)):
        wanted = set(program.stages[stage].params)
        held = [math.prod(one.local_shape(program.mesh)) for one in program.params if one.name in wanted]
        sent = sum(one.sent_bytes for one in program.parcels if one.source == stage)
        rows.append(
            (
                f"{stage}",
                str(program.rank_of_stage(stage)),
                str(program.chunk_of_stage(stage)),
                count_text(sum(held)),
                f"{count_text(costs.flops_per_stage[stage])}FLOP",
                f"{count_text(costs.backward_flops_per_stage[stage])}FLOP",
                seconds_text(cut.seconds[stage]) if cut.seconds else "",
                bytes_text(cut.saved_bytes[stage]) if cut.saved_bytes else "",
                bytes_text(sent),
                cut.after[stage] if stage < len(cut.after) else "the end",
            )
        )
    return "\n".join(
        [
            _drawn(graph_picture(program, "model")),
            heading("Of one rank and one microbatch"),
            table(names, rows, range(1, 9)),
            paragraph(f"Cut {cut.why}. Saved: what backward keeps. Sends: values and gradients to other stages."),
        ]
    )


def _drawn(one: Picture) -> str:
    return picture(one.svg) if one.svg else paragraph(f"No picture: {one.why_not}.")


def _layers(program: Program) -> str:
    parts = []
    if program.painter is not None:
        parts.append(_drawn(program.graph("layer")))
        for stage in range(len(program.stages)):
            count = sum(line.file in (f"stage_{stage}.py", "layers.py") for line in program.lines)
            if count <= LARGEST and len(program.stages) <= 4 and (full := program.graph("full", stage).svg):
                parts.append(folded(f"Stage {stage}, every operator", "", picture(full)))
    parts.append(heading("Module by module"))
    parts += [_module(program, name) for name in _modules(program)]
    return "\n".join(parts)


def _modules(program: Program) -> list[str]:
    """Modules with parameters or matrix products, layers alike as one, in the order of the model."""
    named = [star(one.name.rpartition(".")[0]) for one in program.params]
    return list(dict.fromkeys([*named, *(row.module for row in program.costs.gemms)]))


def _module(program: Program, name: str) -> str:
    params = [one for one in program.params if star(one.name.rpartition(".")[0]) == name]
    times = Counter(star(one.name) for one in params)
    alike: dict[tuple[str, str], ParamSpec] = {}
    for one in params:
        alike.setdefault((star(one.name), one.type_text()), one)
    rows = [
        (
            one.name.rpartition(".")[2],
            _shape(one.shape),
            _shape(one.local_shape(program.mesh)),
            one.type_text(),
            ", ".join(one.aliases[1:]),
            one.why,
        )
        for one in alike.values()
    ]
    body = [table(("parameter", "shape", "a rank's", "type over tp", "tied to", "why"), rows)] if rows else []
    gemms = [row for row in program.costs.gemms if row.module == name]
    if gemms:
        work = Counter[str]()
        for row in gemms:
            work[row.operator.removeprefix("aten.")] += row.forward + row.backward
        told = ", ".join(f"`{operator}` {count_text(flops)}FLOP" for operator, flops in work.items())
        body.append(paragraph(f"Matrix products of a rank and a microbatch, forward and backward, all layers: {told}."))
    calls = Counter(
        (kind, phase, bytes_text(one.payload_bytes), star(one.why))
        for one in program.collectives
        if base(one.axis) == "tp" and one.scope == "microbatch" and call_site(one) == name
        for phase, kind in (("forward", one.forward), ("backward", one.backward))
        if kind not in LOCAL_KINDS
    )
    if calls:
        names = ("x", "collective over tp", "in", "payload", "why")
        body.append(table(names, [(str(count), *key) for key, count in calls.items()], (0, 3)))
    count = max(times.values(), default=1)
    return folded(name or "the model itself", f"x {count}" if count > 1 else "", "\n".join(body))


def _shape(size: tuple[int, ...]) -> str:
    return "x".join(map(str, size)) or "one number"


def _schedule(program: Program, runs: list[Run]) -> str:
    title = f"{program.schedule_name}, p={program.mesh.p} v={program.v} m={program.num_microbatches}"
    orders = program.schedule.splitlines()
    text = folded("As text", "what each pipeline rank does", source("\n".join(orders[:64]) + "\n"))
    remark = paragraph("The same as a trace: `trace.json` beside this page, for ui.perfetto.dev.")
    return "\n".join([picture(schedule_svg(runs, program.orders, title=title)), remark, text])


def _decisions(program: Program) -> str:
    parts: list[str] = []
    if weighed := program.plan.get("weighed"):
        names, rows = weighed_table(weighed)
        parts += [heading(WEIGHED), paragraph(f"{weighed['found']}."), table(names, rows, range(1, len(names)))]
    parts.append(heading("What tp does not split as one would expect"))
    found = program.plan.get("fallbacks", [])
    rows = [
        (one["op"], one["site"] or "the model", one["fact"], one["remedy"], count_text(one["flops"])) for one in found
    ]
    names = ("operator", "in", "fact", "remedy", "FLOPs that every tensor rank repeats")
    parts.append(
        table(names, rows, (4,)) if rows else paragraph("Nothing: every operator is split as one would expect.")
    )
    if program.fusions:
        told = [
            (one.op, one.site or "the model", str(one.times), one.why or f"fused, {one.form}".removesuffix(", "))
            for one in program.fusions
        ]
        parts += [heading("What was fused, and why not"), table(("operator", "in", "x", "result"), told, (2,))]
    if program.unlisted:
        parts += [heading("Operators without a rule of AutoPTD's own"), *map(paragraph, program.unlisted)]
    if odd := odd_products(program):
        parts += [heading("Products that a GPU's aligned kernels do not take"), *map(paragraph, odd)]
    cut = program.costs.cut
    parts += [
        heading("Where the model is cut"),
        paragraph(f"Behind {_listed(cut.after)}: {cut.why}."),
    ]
    kinds = Counter(one.why for one in program.parcels)
    if kinds:
        parts += [heading("How values travel between stages")]
        parts.append(table(("x", "way"), [(str(count), why) for why, count in kinds.items()], (0,)))
    options = program.plan.get("options", {})
    parts += [heading("Options"), table(("option", "value"), [(key, str(value)) for key, value in options.items()])]
    return "\n".join(parts)


def odd_products(program: Program) -> list[str]:
    """What is said of large matrix products whose rows do not all start at 16 bytes, in 16 bits: a head of 50,257 classes."""
    sizes = {row.sizes: row.kind for row in program.costs.products}
    found = []
    for (_, _, *lengths), kind in sizes.items():
        for length in lengths:
            if length >= LEAST_ALIGNED and length % 8:
                fact = f"A {kind} has rows of {length:,} elements, which 8 does not divide."
                found.append(f"{fact} Pad to {ALIGNED} in the model: {aligned(length):,}, the last of them unused.")
    return list(dict.fromkeys(found))


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "nothing"


def _files(program: Program) -> str:
    parts = [
        paragraph(
            "The program: one file a stage, the same on every tensor and data rank; layers.py has what several stages call."
        )
    ]
    for name, text in program.sources.items():
        parts.append(
            folded(name, f"{text.count(chr(10))} lines", source(python_html(text)), is_open=name == "stage_0.py")
        )
    return "\n".join(parts)


def _measured(program: Program, record: Record, runs: list[Run]) -> str:
    simulated, executed = runs
    rows: list[tuple[str, ...]] = [
        ("step, all microbatches", seconds_text(simulated.length), seconds_text(executed.length)),
    ]
    if executed.is_whole:
        bubbles = (f"{one.bubble:.1%}" for one in runs)
        rows.append(("bubble (idle over the busiest rank's work)", *bubbles))
    for stage in range(len(program.stages)):
        for kind, name in ((Kind.F, "forward"), (Kind.B, "backward"), (Kind.W, "weight gradients")):
            said, seen = (_mean(run, stage, kind) for run in runs)
            if seen is not None:
                rows.append((f"stage {stage}, {name} of a microbatch", seconds_text(said or 0.0), seconds_text(seen)))
    kinds = dict(_call_rows(program, record))
    equal = all(said == seen for said, seen in kinds.values())
    table_of_calls = table(
        ("kind", "predicted", "measured"),
        [(key, *(f"{count} x, {bytes_text(sent)} sent" for count, sent in pair)) for key, pair in kinds.items()],
    )
    verdict = (
        "Equal: what ran is what was compiled." if equal else "They DIFFER: the record is not of one training step."
    )
    return "\n".join(
        [
            paragraph(f"Predicted by the cost model, and measured in the recorded step: {executed.remark}."),
            table(("", "predicted", "measured"), rows, (1, 2)),
            heading("Collectives and sends of the recorded ranks"),
            paragraph(verdict),
            table_of_calls,
        ]
    )


def _mean(run: Run, stage: int, kind: Kind) -> float | None:
    found = [
        end - start
        for row in run.spans
        for action, start, end in row
        if action.kind in COMPUTES and (action.stage, action.kind) == (stage, kind)
    ]
    return sum(found) / len(found) if found else None


def _call_rows(program: Program, record: Record) -> Iterator[tuple[str, tuple[tuple[int, float], ...]]]:
    """`tp all-reduce`: (times, bytes sent) as compiled, and as recorded."""
    seen = [call for call in record.collectives if call.kind != "objects" and call.phase != "evaluation"]
    ranks = sorted({call.rank for call in seen})
    said = [call for rank in ranks for call, times in expected_calls(program, rank).items() for _ in range(times)]
    sums: dict[str, list[list[float]]] = {}
    for side, calls in enumerate((said, seen)):
        for call in calls:
            entry = sums.setdefault(f"{call.axis} {call.kind}", [[0, 0.0], [0, 0.0]])[side]
            entry[0] += 1
            entry[1] += _sent(call)
    for key, pair in sorted(sums.items()):
        yield key, tuple((int(count), nbytes) for count, nbytes in pair)


def _sent(call: Call) -> float:
    return wire_bytes(call.kind, call.payload_bytes, call.group_size)


__all__ = ["report_html", "write_report"]
