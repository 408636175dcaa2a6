"""Tell in text what a program communicates: totals first, then every kind of site, then what needs no communication.

In: a `Program` (its graphs are not needed). Out: Markdown, the same bytes for the same program. Payload is the whole
value that a collective works on. Wire bytes are what one rank of n sends over a ring: all-reduce 2(n-1)/n of the payload,
all-gather and reduce-scatter (n-1)/n, all-to-all (n-1)/n of the rank's own n-th, send all of it.

    text = collectives_markdown(program)
    Path("collectives.md").write_text(text)
    # | transformer.h.*.attn.c_attn (gpt.py:46) | 4 | 0-3 | none | all-reduce | 16 KiB | 2 | 16 KiB | ...
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from autoptd.ir.program import Collective, CrossingSpec, Program
from autoptd.viz.words import bytes_text, count_text, letter, star

WIRE = {"all-reduce": 2.0, "all-gather": 1.0, "reduce-scatter": 1.0}  # passes over the ring
CALLS = {"vocab_parallel_cross_entropy": 2}  # the maximum, then all sums together; others are one call
LOCAL_KINDS = ("none", "slice", "zero-pad", "one rank keeps it")


def wire_bytes(kind: str, payload: int, group_size: int) -> float:
    """Bytes that one rank sends for one collective over a ring of `group_size` ranks; 0 for what is local."""
    if kind in LOCAL_KINDS:
        return 0.0
    if kind == "send":
        return float(payload)
    others = (group_size - 1) / group_size
    return payload * others / group_size if kind == "all-to-all" else WIRE[kind] * payload * others


def collectives_markdown(program: Program) -> str:
    """Return the table of everything that is communicated in one step, and why."""
    lines = [
        "# What this program communicates",
        "",
        f"{program.mesh}, v={program.v}, {program.num_microbatches} microbatches per replica and step, "
        f"schedule {program.schedule_name}.",
        "Payload: the whole value. Sent: what one rank sends for it over a ring "
        "(all-reduce 2(n-1)/n, all-gather and reduce-scatter (n-1)/n of the payload).",
        "Not counted: the loss value and the gradient norm, a few bytes once a step.",
        "",
        *_totals(program),
        *_per_microbatch(program),
        *_crossings(program),
        *_per_step(program),
        *_local(program),
        *_left(program),
    ]
    return "\n".join(lines).rstrip() + "\n"


@dataclass(frozen=True)
class _Call:
    """`calls` times per step, pipeline rank `rank` takes part in a collective."""

    rank: int
    axis: str
    kind: str
    direction: str
    calls: int
    payload: int
    wire: float


def _calls(program: Program) -> Iterator[_Call]:
    """What each pipeline rank does in one step; every tensor and data rank of it does the same."""
    m = program.num_microbatches
    for one in program.collectives:
        if one.axis == "pp" and one.scope == "microbatch":
            continue  # sends: the crossings say which rank sends in which direction
        times = m if one.scope == "microbatch" else 1
        for direction, kind in (("forward", one.forward), ("backward", one.backward)):
            if kind not in LOCAL_KINDS:
                wire = wire_bytes(kind, one.payload_bytes, one.group_size)
                for rank in _ranks(program, one):
                    when = direction if one.scope == "microbatch" else "once a step"
                    calls = times * CALLS.get(one.conversion, 1)
                    yield _Call(rank, one.axis, kind, when, calls, times * one.payload_bytes, times * wire)
    for crossing in program.crossings:
        size = _crossing_bytes(crossing)
        for target in crossing.targets:
            ends = program.rank_of_stage(crossing.source), program.rank_of_stage(target)
            if ends[0] != ends[1]:
                yield _Call(ends[0], "pp", "send", "forward", m, m * size, m * size)
                if crossing.has_grad:
                    yield _Call(ends[1], "pp", "send", "backward", m, m * size, m * size)


def _ranks(program: Program, one: Collective) -> list[int]:
    stages = program.param(one.site).stages if one.conversion == "tied sum" else (one.stage,)
    return sorted({program.rank_of_stage(stage) for stage in stages})


def _totals(program: Program) -> Iterator[str]:
    yield "## Per rank and step"
    yield ""
    rows: dict[tuple[str, str, str], dict[int, list[_Call]]] = {}
    for call in _calls(program):
        rows.setdefault((call.axis, call.kind, call.direction), {}).setdefault(call.rank, []).append(call)
    if not rows:
        yield from ("Nothing: this program runs without communication.", "")
        return
    yield from _header("over", "what", "when", "calls", "payload", "sent", "by a rank of", "others send")
    order = {"tp": 0, "dp": 1, "dp x tp": 2, "pp": 3}
    for key in sorted(rows, key=lambda key: (order.get(key[0], 9), key[2] == "once a step", key[1], key[2])):
        sent = {rank: sum(call.wire for call in rows[key].get(rank, ())) for rank in range(program.mesh.p)}
        most = max(sent, key=lambda rank: (sent[rank], -rank))
        calls = rows[key][most]
        numbers = str(sum(call.calls for call in calls)), bytes_text(sum(call.payload for call in calls))
        others = sorted({bytes_text(size) for rank, size in sent.items() if rank != most and size != sent[most]})
        told = "less" if len(others) > 2 else ", ".join(others) if others else "the same" if program.mesh.p > 1 else ""
        yield _row(*key, *numbers, bytes_text(sent[most]), f"pipeline rank {most}", told)
    yield ""


def _per_microbatch(program: Program) -> Iterator[str]:
    found = [one for one in program.collectives if one.axis == "tp" and not _is_local(one)]
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


def _crossings(program: Program) -> Iterator[str]:
    """Values sent between stages, equal ones in one row."""
    found: dict[tuple[str, str, bool], list[str]] = {}
    for one in program.crossings:
        size, key = bytes_text(_crossing_bytes(one)), f"{list(one.shape)} {one.dtype}"
        found.setdefault((key, size, one.has_grad), []).extend(f"{one.source} to {target}" for target in one.targets)
    if not found:
        return
    yield "## Over pp, in every microbatch"
    yield ""
    yield from _header("stages", "x", "value", "forward", "backward", "payload")
    for (value, size, has_grad), links in found.items():
        shown = ", ".join(links if len(links) <= 4 else [*links[:3], "...", links[-1]])
        yield _row(shown, str(len(links)), value, "send", "send" if has_grad else "none", size)
    yield ""


def _per_step(program: Program) -> Iterator[str]:
    found = [one for one in program.collectives if one.scope == "step"]
    if not found:
        return
    yield "## Once a step"
    yield ""
    yield from _header("what", "of", "over", "collective", "payload", "ranks", "sent", "reason")
    for one in found:
        sent = bytes_text(wire_bytes(one.backward, one.payload_bytes, one.group_size))
        numbers = bytes_text(one.payload_bytes), str(one.group_size), sent
        yield _row(one.conversion, one.site, one.axis, one.backward, *numbers, one.why)
    yield ""


def _local(program: Program) -> Iterator[str]:
    found = [one for one in program.collectives if one.axis == "tp" and _is_local(one)]
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
    """What is computed more than once over tp: unknown operators, and matrix products that every rank does in full."""
    if program.mesh.t == 1:
        return
    yield "## Computed by every tensor rank in full"
    yield ""
    total = program.costs.get("total_flops", 0)
    redundant = program.costs.get("redundant_gemm_flops", 0)
    share = f" ({100 * redundant / total:.1f} % of all)" if total and redundant else ""
    yield f"- Matrix products: {count_text(redundant)} FLOPs forward{share}."
    counts = Counter((op, star(module)) for op, module in program.unknown_ops)
    for (op, module), times in counts.items():
        yield f"- {op} in {module or 'the model'} x {times}: no rule says how to split it (`autoptd.register_rule`)."
    if not counts:
        yield "- Operators without a rule: none."
    yield ""


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


def _crossing_bytes(one: CrossingSpec) -> int:
    return math.prod(one.shape) * int(getattr(torch, one.dtype).itemsize)


def _header(*names: str) -> list[str]:
    return [_row(*names), "|" + "---|" * len(names)]


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
