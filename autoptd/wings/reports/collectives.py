"""List what a program communicates: totals, then every kind of site, then changes of type without communication.

In: a `Program` (its graphs are not needed). Out: Markdown, the same bytes for the same program. Calls, their
payload and their wire bytes are those of `program/calls.py`: what `pm.record()` finds executed.

    text = collectives_markdown(program)
    Path("collectives.md").write_text(text)
    # | transformer.h.*.attn.c_attn (gpt.py:46) | 4 | 0-3 | none | all-reduce | 16 KiB | 2 | 16 KiB | ...
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from autoptd.ir.mesh import MESH_AXES, base
from autoptd.ir.names import shown, star
from autoptd.ir.types import LOCAL_KINDS, wire_bytes
from autoptd.program.calls import Call, expected_calls, joint_axis
from autoptd.program.program import Program
from autoptd.program.specs import GATHER, Collective
from autoptd.wings.words import bytes_text, count_text, letter


def collectives_markdown(program: Program) -> str:
    """Return the table of everything that is communicated in one step, and why."""
    lines = [
        "# What this program communicates",
        "",
        f"{program.mesh}, v={program.v}, {program.num_microbatches} microbatches per replica and step, "
        f"schedule {program.schedule_name}.",
        "Payload: the whole value. Sent: what one rank sends for it over a ring "
        "(all-reduce 2(n-1)/n, all-gather and reduce-scatter (n-1)/n of the payload).",
        "Not counted: the gradient norm, a few bytes if requested.",
        "",
        *_totals(program),
        *_per_microbatch(program),
        *_messages(program),
        *_per_step(program),
        *_local(program),
        *_left(program),
        *_unlisted(program),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _totals(program: Program) -> Iterator[str]:
    yield "## Per rank and step"
    yield ""
    # Totals come first: most readers want one number, and the sites only where it surprises them.
    rows = _calls_by_kind(program)
    if not rows:
        yield from ("Nothing: this program runs without communication.", "")
        return
    yield from _header("over", "what", "when", "calls", "payload", "sent", "by a rank of", "other ranks")
    for key in sorted(rows, key=_place):
        sent = [0.0] * program.mesh.pipeline_ranks
        for rank, calls in rows[key].items():
            sent[rank] = sum(times * call.wire_bytes for call, times in calls)
        # A step waits for its busiest rank; the last column has the others.
        busiest = sent.index(max(sent))
        calls = rows[key][busiest]
        count = sum(times for _, times in calls)
        payload = sum(times * call.payload_bytes for call, times in calls)
        numbers = str(count), bytes_text(payload), bytes_text(sent[busiest])
        yield _row(*key, *numbers, f"pipeline rank {busiest}", _others_text(sent, busiest))
    yield ""


def _place(key: tuple[str, str, str]) -> tuple[int, str, bool, str, str]:
    """Return a key that sorts the axes with the most frequent traffic first, and unlisted ones last."""
    axis, kind, when = key
    first = axis.split(" x ")[0]
    place = MESH_AXES.index(first) if first in MESH_AXES else len(MESH_AXES)
    return place, axis, when == "once a step", kind, when


def _calls_by_kind(program: Program) -> dict[tuple[str, str, str], dict[int, list[tuple[Call, int]]]]:
    """Return (axis, kind, when) -> pipeline rank -> its calls of a step, and how often it makes each."""
    rows: dict[tuple[str, str, str], dict[int, list[tuple[Call, int]]]] = {}
    # One rank stands for its pipeline rank: all tensor and data ranks of it make the same calls.
    for rank in range(program.mesh.pipeline_ranks):
        for call, times in expected_calls(program, program.mesh.at_stage(0, rank)).items():
            when = "once a step" if call.phase == "step" else call.phase
            # Forward and backward stay apart: they overlap with different work.
            rows.setdefault((call.axis, call.kind, when), {}).setdefault(rank, []).append((call, times))
    return rows


def _others_text(sent: list[float], busiest: int) -> str:
    """Return what the other pipeline ranks send."""
    others = sorted({bytes_text(size) for size in sent if size != sent[busiest]})
    if len(others) > 2:
        return "less"
    if others:
        return ", ".join(others)
    return "the same" if len(sent) > 1 else ""


def _per_microbatch(program: Program) -> Iterator[str]:
    for axis in (*program.mesh.value_axes, *program.busy_axes):
        yield from _over_axis(program, axis)


def _over_axis(program: Program, axis: str) -> Iterator[str]:
    within = [call for call in program.collectives if call.scope == "microbatch" and base(call.axis) == axis]
    # The all-gathers of messages are listed with the messages.
    found = [call for call in within if call.conversion != GATHER and not _is_local(call)]
    if not found:
        return
    yield f"## Over {axis}, in every microbatch"
    yield ""
    yield "`x N`: the number of such sites. Megatron's f is I to R, its g is P to I."
    yield ""
    yield from _header(
        "site", "x", "stages", "conversion", "forward", "backward", "payload", "ranks", "sent", "reason"
    )
    for sites in _kinds(found):
        call = sites[0]
        kinds = call.forward, call.backward
        wire = sum(wire_bytes(kind, call.payload_bytes, call.group_size) for kind in kinds)
        name = f"{letter(call.conversion)}: {call.conversion}" if letter(call.conversion) else call.conversion
        numbers = bytes_text(call.payload_bytes), str(call.group_size), bytes_text(wire)
        yield _row(*_site(sites), name, call.forward, call.backward, *numbers, _reason(call))
    yield ""


def _messages(program: Program) -> Iterator[str]:
    """Yield the messages between stages, and the all-gathers of scattered ones; equal messages in one row."""
    links_of: dict[tuple[str, ...], list[str]] = {}
    for buffer in program.transfers:
        what = "gradient" if buffer.is_gradient else "value"
        plural = "s" if len(buffer.names) > 1 else ""
        size = f"{len(buffer.names)} {what}{plural}, {buffer.numel} {buffer.dtype}"
        afterwards = ""
        if buffer.parts > 1:
            over = joint_axis(program.mesh, program.mesh.value_axes)
            afterwards = f"all-gather over {over}, {bytes_text(buffer.parts * buffer.sent_bytes)}"
        row = (size, bytes_text(buffer.sent_bytes), afterwards, buffer.why)
        links_of.setdefault(row, []).append(f"{buffer.source} to {buffer.target}")
    if not links_of:
        return
    over = joint_axis(program.mesh, program.mesh.stage_axes)
    yield f"## Over {over}, in every microbatch"
    yield ""
    yield from _header("stages", "x", "elements", "sent by a rank", "afterwards", "reason")
    for cells, links in links_of.items():
        # A deep pipeline has many links of one kind.
        shown = links if len(links) <= 4 else [*links[:3], "...", links[-1]]
        yield _row(", ".join(shown), str(len(links)), *cells)
    yield ""


def _per_step(program: Program) -> Iterator[str]:
    found = [call for call in program.collectives if call.scope != "microbatch"]
    if not found:
        return
    yield "## Once a step"
    yield ""
    yield from _header("what", "of", "over", "collective", "payload", "ranks", "sent", "reason")
    for call in found:
        # A gradient is summed backward, the loss forward: the other direction is local.
        kind = call.forward if call.backward in LOCAL_KINDS else call.backward
        sent = bytes_text(wire_bytes(kind, call.payload_bytes, call.group_size))
        numbers = bytes_text(call.payload_bytes), str(call.group_size), sent
        yield _row(call.conversion, call.site, call.axis, kind, *numbers, call.why)
    yield ""


def _local(program: Program) -> Iterator[str]:
    axes = program.mesh.value_axes
    found = [call for call in program.collectives if base(call.axis) in axes and _is_local(call)]
    if not found:
        return
    yield "## Changes of type without communication"
    yield ""
    yield from _header("site", "x", "stages", "conversion", "forward", "backward", "value", "reason")
    for sites in _kinds(found):
        call = sites[0]
        size = bytes_text(call.payload_bytes)
        yield _row(*_site(sites), call.conversion, call.forward, call.backward, size, _reason(call))
    yield ""


def _left(program: Program) -> Iterator[str]:
    """Yield what every tensor rank computes in full, or does not split as expected, and why."""
    mesh = program.mesh
    if not joint_axis(mesh, [axis for axis in mesh.value_axes if axis not in mesh.token_axes]):
        return
    yield "## Computed by every tensor rank in full"
    yield ""
    total = program.costs.total_flops
    redundant = program.costs.redundant_gemm_flops
    # A model without products has no share.
    share = f" ({100 * redundant / total:.1f} % of all)" if total and redundant else ""
    yield f"- Matrix products: {count_text(redundant)} FLOPs forward{share}."
    counts = Counter((star(item.site), item.op, item.fact, item.remedy) for item in program.fallbacks)
    for (module, op, fact, remedy), times in counts.items():
        yield f"- {op} in {module or 'the model'} x {times}: {fact}. Remedy: {remedy}."
    if not counts:
        yield "- Every operator is split as expected."
    yield ""


def _unlisted(program: Program) -> Iterator[str]:
    """Yield the operators without a record in `ir/operators`."""
    if program.unlisted:
        yield "## Operators without a rule of AutoPTD's own"
        yield ""
        yield from (f"- {operator}." for operator in program.unlisted)
        yield ""


def _is_local(call: Collective) -> bool:
    return call.forward in LOCAL_KINDS and call.backward in LOCAL_KINDS


def _kinds(found: Iterable[Collective]) -> list[list[Collective]]:
    """Group sites that differ in layer and stage only; in the order of the program."""
    groups: dict[tuple[str | int, ...], list[Collective]] = {}
    for call in found:
        # Layers differ in their number alone: with a star in its place, equal sites have one row.
        key = (star(call.site), call.conversion, call.payload_bytes, call.group_size, _reason(call))
        groups.setdefault(key, []).append(call)
    return list(groups.values())


def _site(sites: list[Collective]) -> tuple[str, str, str]:
    """Return (where, how often, in which stages)."""
    name = star(sites[0].site) if len(sites) > 1 else sites[0].site
    stages = sorted({call.stage for call in sites})
    is_range = len(stages) > 2 and stages[-1] - stages[0] == len(stages) - 1
    shown = f"{stages[0]}-{stages[-1]}" if is_range else ", ".join(map(str, stages))
    return name.strip() or "the model", str(len(sites)), shown


def _reason(call: Collective) -> str:
    """Return the reason, without the module where that is the site's own."""
    where = star(call.site).partition(" (")[0]
    return star(call.why).removeprefix(f"{where}: ")


def _header(*names: str) -> list[str]:
    return [_row(*names), "|" + "---|" * len(names)]


def _row(*cells: str) -> str:
    return "| " + " | ".join(shown(cell).replace("|", "\\|") for cell in cells) + " |"
