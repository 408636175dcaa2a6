"""Compare two plans, or two saved programs.

In: two plans or programs, each as the path of a plan.json, the path of a folder that `program.save` wrote, a `Program`
or a plan as a dict. Out: text, grouped; "" if nothing differs. Two programs are also compared by the types of their
parameters and their communication, and costs of `autoptd show` that differ are listed side by side. Equal layers share
a line, with a star for their number.

    print(autoptd.diff("out/a", "out/b"))
    # mesh
    #   t: 2 -> 4
    # parameters over tp
    #   transformer.h.*.mlp.c_fc.weight: S(tp, dim 0: [128]) -> I
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoptd.errors import PlanError
from autoptd.ir.names import star
from autoptd.ir.plan import load_plan
from autoptd.ir.types import LOCAL_KINDS
from autoptd.program.calls import call_site
from autoptd.program.program import Program
from autoptd.program.specs import Collective, ParamSpec
from autoptd.wings.words import aligned, bytes_text, seconds_text

if TYPE_CHECKING:
    from autoptd.wings.reports.summary import Summary

NOTHING = "nothing"
COMPARED = ("mesh", "v", "num_microbatches", "schedule_name", "plan", "params", "collectives", "fallbacks")
# Fields of a program that are not compared: values, and fields that follow from the rest.
LEFT_OUT = ("buffers", "graphs", "costs", "lines", "traced")


def diff(a: Any, b: Any) -> str:
    """Return the differences from `a` to `b` (`what: there -> here`), "" if there are none.

    PlanError if a plan or program cannot be read.
    """
    (plan, program), (other_plan, other) = _read(a), _read(b)
    groups = _plans(plan, other_plan)
    if program is None or other is None:
        groups["shard"] = _entries(_shards(plan), _shards(other_plan))
        return _text_of(groups)
    # The types of all parameters say more than the patterns of the plans.
    groups |= _programs(program, other)
    if not any(groups.values()):
        return "" if program.fingerprint() == other.fingerprint() else "also differ\n  program.json\n"
    return _text_of({**groups, "costs, by the cost model": _costs(program, other)})


def _text_of(groups: Mapping[str, list[str]]) -> str:
    text = ""
    for name, lines in groups.items():
        if lines:
            text += "".join([f"{name}\n", *(f"  {line}\n" for line in lines)])
    return text


def _costs(a: Program, b: Program) -> list[str]:
    """Return a table of the costs that differ, A next to B; none for programs written by hand."""
    if not (a.costs.cut.seconds and b.costs.cut.seconds):
        return []
    # Imported here, as it loads torch: two plans do not need it.
    from autoptd.wings.reports.summary import summarize

    left, right = _costs_of(summarize(a)), _costs_of(summarize(b))
    rows = [(name, left.get(name, NOTHING), right.get(name, NOTHING)) for name in {**left, **right}]
    rows = [row for row in rows if row[1] != row[2]]
    return aligned([("", "A", "B"), *rows]) if rows else []


def _costs_of(summary: Summary) -> dict[str, str]:
    fullest = max(summary.ranks, key=lambda rank: rank.total_bytes)
    costs = {
        "ranks": str(summary.mesh.size),
        "memory of the fullest rank": bytes_text(fullest.total_bytes),
        "of it, activations": bytes_text(fullest.activation_bytes),
    }
    for traffic in summary.traffic:
        costs[f"sent over {traffic.axis} by one rank, a step"] = bytes_text(traffic.sent_bytes)
    return costs | {
        "seconds of a step": seconds_text(summary.step_seconds),
        "bubble, of the work": f"{summary.bubble:.1%}",
    }


def _read(given: Any) -> tuple[Mapping[str, Any], Program | None]:
    """Return the plan, and the program where there is one."""
    if isinstance(given, Program):
        return given.plan, given
    if isinstance(given, (str, Path)) and (Path(given) / "program.json").is_file():
        try:
            program = Program.load(given)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise PlanError(str(given), f"cannot be read: {error}", "save the program again") from error
        return program.plan, program
    return load_plan(given), None


def _plans(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for key in ("mesh", "options"):
        groups[key] = _entries(a.get(key, {}), b.get(key, {}))
    groups["schedule"] = _entries(_scalars(a), _scalars(b))
    groups["cut"] = _entries(_cut(a), _cut(b))
    groups["fallbacks"] = _entries(_fallbacks(a), _fallbacks(b))
    return groups


def _scalars(plan: Mapping[str, Any]) -> dict[str, Any]:
    return {key: plan[key] for key in ("num_microbatches", "schedule", "version") if key in plan}


def _cut(plan: Mapping[str, Any]) -> dict[str, str]:
    return {"after": ", ".join(map(str, plan["cut"])) or NOTHING} if "cut" in plan else {}


def _fallbacks(plan: Mapping[str, Any]) -> dict[str, str]:
    # Reports, not decisions; but an operator that is no longer split is important.
    fallbacks = plan.get("fallbacks", ())
    return {f"{entry['op']} in {entry['site'] or 'the model'}": entry["fact"] for entry in fallbacks}


def _shards(plan: Mapping[str, Any]) -> dict[str, str]:
    shards = {}
    for entry in plan.get("shard", ()):
        dim = entry.get("dim")
        shards[entry["pattern"]] = "whole" if dim is None else f"split along dim {dim}"
    return shards


def _programs(a: Program, b: Program) -> dict[str, list[str]]:
    groups = {
        f"parameters over {a.mesh.value_text}": _by_layer(a, b, ParamSpec.type_text),
        "parameters": _by_layer(a, b, _about),
    }
    for scope in ("microbatch", "step", "update"):
        totals = _entries(_totals(a, scope), _totals(b, scope))
        sites = _entries(_sites(a, scope), _sites(b, scope))
        groups[f"communicated in every {scope}"] = [*totals, *sites]
    # All other fields, including future ones.
    names = [field.name for field in fields(Program) if field.name not in (*COMPARED, *LEFT_OUT, "sources")]
    others = [name for name in names if getattr(a, name) != getattr(b, name)]
    for file in sorted({*a.sources, *b.sources}):
        if a.sources.get(file) != b.sources.get(file):
            others.append(file)
    groups["also differ"] = [", ".join(others)] if others else []
    return groups


def _about(spec: ParamSpec) -> str:
    frozen = "" if spec.requires_grad else ", frozen"
    return f"{list(spec.shape)} {spec.storage.dtype}{frozen}"


def _by_layer(a: Program, b: Program, text: Callable[[ParamSpec], str]) -> list[str]:
    """Compare a text per parameter, in one line for all layers that have the same text on either side."""
    # (whether it is of a, "h.*.mlp.c_fc.weight") -> the texts of this parameter in its layers.
    alike: dict[tuple[bool, str], set[str]] = {}
    for program in (a, b):
        for spec in program.params:
            alike.setdefault((program is a, star(spec.name)), set()).add(text(spec))
    # Layers that differ are listed one by one.
    mixed = {name for (_, name), texts in alike.items() if len(texts) > 1}

    def texts(program: Program) -> dict[str, str]:
        text_of = {}
        for spec in program.params:
            shared = star(spec.name)
            text_of[spec.name if shared in mixed else shared] = text(spec)
        return text_of

    return _entries(texts(a), texts(b))


def _calls(program: Program, scope: str) -> Iterator[tuple[Collective, str, str]]:
    """Yield (collective, phase, kind) of every call of a scope."""
    for call in program.collectives:
        for phase, kind in (("forward", call.forward), ("backward", call.backward)):
            if call.scope == scope and kind not in LOCAL_KINDS:
                yield call, phase, kind


def _totals(program: Program, scope: str) -> dict[str, str]:
    """Sum the calls of all stages, and their payload."""
    calls, nbytes = Counter[str](), Counter[str]()
    for call, phase, kind in _calls(program, scope):
        key = f"{kind} over {call.axis}"
        if scope == "microbatch":
            key += f", {phase}"
        calls[key] += 1
        nbytes[key] += call.payload_bytes
    return {f"all {key}": f"{count} of {bytes_text(nbytes[key])} in all" for key, count in calls.items()}


def _sites(program: Program, scope: str) -> dict[str, str]:
    """Return the communication of each kind of site, with the number of equal layers."""
    # Site -> {"all-reduce forward over tp, 3.1 MB on 4 ranks": 12}: 12 layers are one line.
    texts_of: dict[str, Counter[str]] = {}
    for call in program.collectives:
        if call.scope == scope and (kinds := _kinds(call)):
            what = f"over {call.axis}, {bytes_text(call.payload_bytes)} on {call.group_size} ranks"
            texts_of.setdefault(call_site(call), Counter())[f"{kinds} {what}"] += 1
    sites = {}
    for site, texts in texts_of.items():
        sites[site] = "; ".join(f"{times} x {text}" for text, times in sorted(texts.items()))
    return sites


def _kinds(call: Collective) -> str:
    """Return "all-gather forward and reduce-scatter backward", "" without communication."""
    kinds = []
    for phase, kind in (("forward", call.forward), ("backward", call.backward)):
        if kind in LOCAL_KINDS:
            continue
        # Sums of a step are neither forward nor backward.
        kinds.append(kind if call.scope == "step" and phase == "backward" else f"{kind} {phase}")
    return " and ".join(kinds)


def _entries(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """Return `key: there -> here` for every key that differs, in the order of both."""
    entries = []
    for key in {**a, **b}:
        if key not in a or key not in b or a[key] != b[key]:
            entries.append(f"{key}: {_text(a, key)} -> {_text(b, key)}")
    return entries


def _text(record: Mapping[str, Any], key: str) -> str:
    if key not in record:
        return NOTHING
    return record[key] if isinstance(record[key], str) else json.dumps(record[key], default=str)
