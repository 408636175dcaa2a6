"""What differs between two plans, or two saved programs, for people.

In: two of: the path of a plan.json, that of a folder which `program.save` wrote, a `Program`, a plan as a dict. Out: text,
grouped; "" where nothing differs. With a program on both sides the parameters' types and what is communicated are compared as
well, and their costs stand side by side: those of `autoptd show` that differ. Layers that are alike are one line, their number
a star.

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
from autoptd.ir.plan import load_plan
from autoptd.program.calls import LOCAL_KINDS, call_site, star
from autoptd.program.program import Program
from autoptd.program.specs import Collective, ParamSpec
from autoptd.viz.words import bytes_text

if TYPE_CHECKING:
    from autoptd.reports.summary import Summary

NOTHING = "nothing"
COMPARED = ("mesh", "v", "num_microbatches", "schedule_name", "plan", "params", "collectives", "fallbacks")
# Values, and what follows from the rest.
LEFT_OUT = ("buffers", "graphs", "explainer", "painter", "costs", "lines")


def diff(a: Any, b: Any) -> str:
    """Return what differs from `a` to `b`: `what: there -> here`, "" where nothing does. PlanError for what cannot be read."""
    (plan, program), (other_plan, other) = _read(a), _read(b)
    groups = _plans(plan, other_plan)
    if program is not None and other is not None:
        groups = {name: lines for name, lines in groups.items() if name != "shard"}
        groups |= _programs(program, other)
    else:
        groups["shard"] = _entries(_shards(plan), _shards(other_plan))
    if program is None or other is None:
        return _text_of(groups)
    if not any(groups.values()):
        return "" if program.fingerprint() == other.fingerprint() else "also differ\n  program.json\n"
    return _text_of({**groups, "costs, as the cost model has them": _costs(program, other)})


def _text_of(groups: Mapping[str, list[str]]) -> str:
    return "".join(f"{name}\n" + "".join(f"  {line}\n" for line in lines) for name, lines in groups.items() if lines)


def _costs(a: Program, b: Program) -> list[str]:
    """A table A | B of what people compare, where it differs; nothing for programs that were written by hand."""
    if not (a.costs.cut.seconds and b.costs.cut.seconds):
        return []
    # The passes: two plans need none of them.
    from autoptd.reports.summary import summarize

    sides = [_costs_of(summarize(one)) for one in (a, b)]
    rows = [(name, *(one.get(name, NOTHING) for one in sides)) for name in {**sides[0], **sides[1]}]
    rows = [row for row in rows if row[1] != row[2]]
    table = [("", "A", "B"), *rows] if rows else []
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]


def _costs_of(one: Summary) -> dict[str, str]:
    from autoptd.reports.summary import seconds_text

    fullest = max(one.ranks, key=lambda rank: rank.total_bytes)
    costs = {
        "ranks": str(one.mesh.size),
        "memory of the fullest rank": bytes_text(fullest.total_bytes),
        "of it, activations": bytes_text(fullest.activation_bytes),
    }
    costs |= {f"sent over {two.axis} by one rank, a step": bytes_text(two.sent_bytes) for two in one.traffic}
    return costs | {
        "seconds of a step": seconds_text(one.step_seconds),
        "bubble, of the work": f"{one.bubble:.1%}",
    }


def _read(given: Any) -> tuple[Mapping[str, Any], Program | None]:
    """The plan, and the program where there is one."""
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
    whole = {"num_microbatches", "schedule", "version"}
    groups = {key: _entries(a.get(key, {}), b.get(key, {})) for key in ("mesh", "options")}
    groups["schedule"] = _entries(*({key: plan[key] for key in sorted(whole) if key in plan} for plan in (a, b)))
    cuts = [{"behind": ", ".join(map(str, plan["cut"])) or NOTHING} if "cut" in plan else {} for plan in (a, b)]
    groups["cut"] = _entries(*cuts)
    groups["fallbacks"] = _entries(*(_fallbacks(plan) for plan in (a, b)))
    return groups


def _fallbacks(plan: Mapping[str, Any]) -> dict[str, str]:
    return {f"{one['op']} in {one['site'] or 'the model'}": one["fact"] for one in plan.get("fallbacks", ())}


def _shards(plan: Mapping[str, Any]) -> dict[str, str]:
    return {
        one["pattern"]: "whole" if one.get("dim") is None else f"split along dim {one['dim']}"
        for one in plan.get("shard", ())
    }


def _programs(a: Program, b: Program) -> dict[str, list[str]]:
    groups = {"parameters over tp": _by_layer(a, b, ParamSpec.type_text), "parameters": _by_layer(a, b, _about)}
    for scope in ("microbatch", "step"):
        totals, sites = ([function(one, scope) for one in (a, b)] for function in (_totals, _sites))
        groups[f"communicated in every {scope}"] = [*_entries(*totals), *_entries(*sites)]
    names = [one.name for one in fields(Program) if one.name not in (*COMPARED, *LEFT_OUT)]
    told = [name for name in names if name != "sources" and getattr(a, name) != getattr(b, name)]
    files = [name for name in sorted({*a.sources, *b.sources}) if a.sources.get(name) != b.sources.get(name)]
    return groups | {"also differ": [", ".join([*told, *files])] if told or files else []}


def _about(one: ParamSpec) -> str:
    frozen = "" if one.requires_grad else ", frozen"
    return f"{list(one.shape)} {one.dtype}{frozen}"


def _by_layer(a: Program, b: Program, text: Callable[[ParamSpec], str]) -> list[str]:
    """What differs in a text per parameter; one for all layers where theirs are alike on either side."""
    alike: dict[tuple[bool, str], set[str]] = {}
    for program in (a, b):
        for one in program.params:
            alike.setdefault((program is a, star(one.name)), set()).add(text(one))
    mixed = {name for (_, name), texts in alike.items() if len(texts) > 1}

    def texts(program: Program) -> dict[str, str]:
        return {one.name if star(one.name) in mixed else star(one.name): text(one) for one in program.params}

    return _entries(texts(a), texts(b))


def _calls(program: Program, scope: str) -> Iterator[tuple[Collective, str, str]]:
    """(collective, phase, kind) of every call of a scope."""
    for one in program.collectives:
        for phase, kind in (("forward", one.forward), ("backward", one.backward)):
            if one.scope == scope and kind not in LOCAL_KINDS:
                yield one, phase, kind


def _totals(program: Program, scope: str) -> dict[str, str]:
    """Calls of all stages together, and their payload."""
    calls, nbytes = Counter[str](), Counter[str]()
    for one, phase, kind in _calls(program, scope):
        key = f"{kind} over {one.axis}" + (f", {phase}" if scope == "microbatch" else "")
        calls[key] += 1
        nbytes[key] += one.payload_bytes
    return {f"all {key}": f"{count} of {bytes_text(nbytes[key])} in all" for key, count in calls.items()}


def _sites(program: Program, scope: str) -> dict[str, str]:
    """What each kind of site communicates: of layers that are alike, how many they are."""
    found: dict[str, Counter[str]] = {}
    for one in program.collectives:
        phases = {"forward": one.forward, "backward": one.backward}
        kinds = [f"{kind} {phase}" for phase, kind in phases.items() if kind not in LOCAL_KINDS]
        if one.scope == scope and kinds:
            text = f"{' and '.join(kinds)} over {one.axis}, {bytes_text(one.payload_bytes)} on {one.group_size} ranks"
            found.setdefault(call_site(one), Counter())[text.replace(" backward", "") if scope == "step" else text] += 1
    return {
        site: "; ".join(f"{times} x {text}" for text, times in sorted(texts.items())) for site, texts in found.items()
    }


def _entries(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """`key: there -> here` for every key that differs, in the order of both."""
    keys = [key for key in {**a, **b} if key not in a or key not in b or a[key] != b[key]]
    return [f"{key}: {_text(a, key)} -> {_text(b, key)}" for key in keys]


def _text(record: Mapping[str, Any], key: str) -> str:
    if key not in record:
        return NOTHING
    return record[key] if isinstance(record[key], str) else json.dumps(record[key], default=str)


__all__ = ["diff"]
