"""Tell in text what a program communicates: totals first, then every kind of site, then what needs no communication.

In: a `Program` (its graphs are not needed). Out: Markdown, the same bytes for the same program. Calls, their payload and their
wire bytes are those of `program/calls.py`: what `pm.record()` finds executed.

    text = collectives_markdown(program)
    Path("collectives.md").write_text(text)
    # | transformer.h.*.attn.c_attn (gpt.py:46) | 4 | 0-3 | none | all-reduce | 16 KiB | 2 | 16 KiB | ...
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from autoptd.ir.mesh import Coordinate
from autoptd.ir.sub_axes import base
from autoptd.program.calls import LOCAL_KINDS, Call, expected_calls, star, wire_bytes
from autoptd.program.program import Program
from autoptd.program.specs import GATHER, Collective
from autoptd.viz.words import bytes_text, count_text, letter


def collectives_markdown(program: Program) -> str:
    """Return the table of everything that is communicated in one step, and why."""
    lines = [
        "# What this program communicates",
        "",
        f"{program.mesh}, v={program.v}, {program.num_microbatches} microbatches per replica and step, "
        f"schedule {program.schedule_name}.",
        "Payload: the whole value. Sent: what one rank sends for it over a ring "
        "(all-reduce 2(n-1)/n, all-gather and reduce-scatter (n-1)/n of the payload).",
        "Not counted: the gradient norm, a few bytes where it is asked for.",
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
    p = program.mesh.p
    rows: dict[tuple[str, str, str], dict[int, list[tuple[Call, int]]]] = {}
    for rank in range(p):  # every tensor and data rank of a pipeline rank does the same
        for call, times in expected_calls(program, program.mesh.rank(Coordinate(pp=rank))).items():
            when = "once a step" if call.phase == "step" else call.phase
            rows.setdefault((call.axis, call.kind, when), {}).setdefault(rank, []).append((call, times))
    if not rows:
        yield from ("Nothing: this program runs without communication.", "")
        return
    yield from _header("over", "what", "when", "calls", "payload", "sent", "by a rank of", "others send")
    order = {"tp": 0, "dp": 1, "dp x tp": 2, "pp": 3}
    for key in sorted(rows, key=lambda key: (order.get(key[0], 9), key[2] == "once a step", key[1], key[2])):
        sent = {rank: sum(times * call.wire_bytes for call, times in rows[key].get(rank, ())) for rank in range(p)}
        most = max(sent, key=lambda rank: (sent[rank], -rank))
        calls = rows[key][most]
        payload = sum(times * call.payload_bytes for call, times in calls)
        numbers = str(sum(times for _, times in calls)), bytes_text(payload)
        others = sorted({bytes_text(size) for rank, size in sent.items() if rank != most and size != sent[most]})
        told = "less" if len(others) > 2 else ", ".join(others) if others else "the same" if p > 1 else ""
        yield _row(*key, *numbers, bytes_text(sent[most]), f"pipeline rank {most}", told)
    yield ""


def _per_microbatch(program: Program) -> Iterator[str]:
    found = [
        one for one in program.collectives if base(one.axis) == "tp" and not _is_local(one) and one.conversion != GATHER
    ]
    if not found:
        return
    yield "## Over tp, in every microbatch"
    yield ""
    yield "`x N`: so many sites of this kind. Megatron's f is I to R, its g is P to I."
    yield ""
    yield from _header("site", "x", "stages", "conversion", "forward", "backward", "payload", "ranks", "sent", "reason")
    for sites in _kinds(found):
        one = sites[0]
        wire = sum(wire_bytes(kind, one.payload_bytes, one.group_size) for kind in (one.forward, one.backward))
        name = f"{letter(one.conversion)}: {one.conversion}" if letter(one.conversion) else one.conversion
        numbers = bytes_text(one.payload_bytes), str(one.group_size), bytes_text(wire)
        yield _row(*_site(sites), name, one.forward, one.backward, *numbers, _reason(one))
    yield ""


def _messages(program: Program) -> Iterator[str]:
    """What is sent between stages, and gathered where it was scattered; equal ones in one row."""
    found: dict[tuple[str, ...], list[str]] = {}
    for one in program.parcels:
        what = f"gradient{'s'[: len(one.names) > 1]}" if one.is_gradient else f"value{'s'[: len(one.names) > 1]}"
        then = f"all-gather over tp, {bytes_text(one.parts * one.sent_bytes)}" if one.parts > 1 else ""
        size = f"{len(one.names)} {what}, {one.numel} {one.dtype}"
        found.setdefault((size, bytes_text(one.sent_bytes), then, one.why), []).append(f"{one.source} to {one.target}")
    if not found:
        return
    yield "## Over pp, in every microbatch"
    yield ""
    yield from _header("stages", "x", "elements", "a rank sends", "then", "reason")
    for row, links in found.items():
        shown = ", ".join(links if len(links) <= 4 else [*links[:3], "...", links[-1]])
        yield _row(shown, str(len(links)), *row)
    yield ""


def _per_step(program: Program) -> Iterator[str]:
    found = [one for one in program.collectives if one.scope == "step"]
    if not found:
        return
    yield "## Once a step"
    yield ""
    yield from _header("what", "of", "over", "collective", "payload", "ranks", "sent", "reason")
    for one in found:
        kind = one.forward if one.backward in LOCAL_KINDS else one.backward
        sent = bytes_text(wire_bytes(kind, one.payload_bytes, one.group_size))
        numbers = bytes_text(one.payload_bytes), str(one.group_size), sent
        yield _row(one.conversion, one.site, one.axis, kind, *numbers, one.why)
    yield ""


def _local(program: Program) -> Iterator[str]:
    found = [one for one in program.collectives if base(one.axis) == "tp" and _is_local(one)]
    if not found:
        return
    yield "## Changes of type without communication"
    yield ""
    yield from _header("site", "x", "stages", "conversion", "forward", "backward", "value", "reason")
    for sites in _kinds(found):
        one = sites[0]
        size = bytes_text(one.payload_bytes)
        yield _row(*_site(sites), one.conversion, one.forward, one.backward, size, _reason(one))
    yield ""


def _left(program: Program) -> Iterator[str]:
    """What is computed more than once over tp, or split otherwise than one would expect, and why."""
    if program.mesh.t == 1:
        return
    yield "## Computed by every tensor rank in full"
    yield ""
    total = program.costs.total_flops
    redundant = program.costs.redundant_gemm_flops
    share = f" ({100 * redundant / total:.1f} % of all)" if total and redundant else ""
    yield f"- Matrix products: {count_text(redundant)} FLOPs forward{share}."
    counts = Counter((star(one.site), one.op, one.fact, one.remedy) for one in program.fallbacks)
    for (module, op, fact, remedy), times in counts.items():
        yield f"- {op} in {module or 'the model'} x {times}: {fact}. Remedy: {remedy}."
    if not counts:
        yield "- Every operator is split as one would expect."
    yield ""


def _unlisted(program: Program) -> Iterator[str]:
    """Operators that AutoPTD has no row for."""
    if program.unlisted:
        yield from ("## Operators without a rule of AutoPTD's own", "", *(f"- {one}." for one in program.unlisted), "")


def _is_local(one: Collective) -> bool:
    return one.forward in LOCAL_KINDS and one.backward in LOCAL_KINDS


def _kinds(found: Iterable[Collective]) -> list[list[Collective]]:
    """Sites that differ in layer and stage only, together; in the order of the program."""
    groups: dict[tuple[str | int, ...], list[Collective]] = {}
    for one in found:
        key = (star(one.site), one.conversion, one.payload_bytes, one.group_size, _reason(one))
        groups.setdefault(key, []).append(one)
    return list(groups.values())


def _site(sites: list[Collective]) -> tuple[str, str, str]:
    """(where, how often, in which stages)."""
    name = star(sites[0].site) if len(sites) > 1 else sites[0].site
    stages = sorted({one.stage for one in sites})
    is_range = len(stages) > 2 and stages[-1] - stages[0] == len(stages) - 1
    shown = f"{stages[0]}-{stages[-1]}" if is_range else ", ".join(map(str, stages))
    return name.strip() or "the model", str(len(sites)), shown


def _reason(one: Collective) -> str:
    """The reason, without the module where that is the site's own."""
    where = star(one.site).partition(" (")[0]
    return star(one.why).removeprefix(f"{where}: ")


def _header(*names: str) -> list[str]:
    return [_row(*names), "|" + "---|" * len(names)]


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
