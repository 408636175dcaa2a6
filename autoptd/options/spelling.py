"""From keywords to `Options`: records and flat names, old spellings, a plan, a bound on memory.

In: the keywords of `parallelize`, `compile` or `verify`. Out: settings by their flat names, which plans, the
planner and the command line speak; and `Options`.

    flat({"t": 2, "zero": Zero(shard=8)})              # {"t": 2, "zero": 1, "dp_shard": 8}
    grouped({"t": 2, "zero": 1, "dp_shard": 8})        # {"t": 2, "zero": Zero(stage=1, shard=8)}
    make_options(t=2, zero=1, dp_shard=8)              # Options
"""

from __future__ import annotations

import os
import reprlib
import warnings
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from autoptd.errors import PlanError, a_type
from autoptd.ir.actions import is_path
from autoptd.ir.machine import machine_record
from autoptd.ir.plan import nearest, read_plan
from autoptd.ir.quantities import check_memory
from autoptd.options.elsewhere import remedy_for
from autoptd.options.keyword import Keyword, Setting, settings_of, without_missing
from autoptd.options.options import Options

# The parts of Options by the keywords that take them, with their settings.
PARTS: dict[str, tuple[type, tuple[Setting, ...]]] = {
    item.name: (type(item.default), tuple(settings_of(item.default)))
    for item in fields(Options)
    if "keyword" not in item.metadata
}


def _places() -> dict[str, tuple[str, Setting]]:
    """Return the place of each setting in Options, by its flat name: the part ("" for Options itself), and
    the declaration.
    """
    own = {setting.field: setting for setting in settings_of(Options)}
    found: dict[str, tuple[str, Setting]] = {}
    for item in fields(Options):
        if item.name in own:
            found[item.name] = ("", own[item.name])
        else:
            found |= {setting.name: (item.name, setting) for setting in PARTS[item.name][1]}
    return found


PLACES = _places()
KEYWORDS: dict[str, Keyword] = {name: setting.keyword for name, (_, setting) in PLACES.items()}
# Former keywords that are now in a record: all settings but those with the name of their part.
OLD = {name: part for name, (part, _) in PLACES.items() if part not in ("", name)}


def settings(options: Options) -> dict[str, Any]:
    """Return the settings by their flat names."""
    owners = {name: getattr(options, part) if part else options for name, (part, _) in PLACES.items()}
    return {name: getattr(owners[name], setting.field) for name, (_, setting) in PLACES.items()}


def flat(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return keywords with the settings of records by flat names; warn once of former keywords."""
    found = dict(keywords)
    old = [name for name in OLD if found.get(name) is not None]
    for part, (kind, places) in PARTS.items():
        value = found.get(part)
        if isinstance(value, kind):
            del found[part]
            said = _said(value, part, places)
            if both := [name for name in old if OLD[name] == part]:
                fact = f"both say how {part} is set"
                raise PlanError(f"{part}= and {both[0]}=", fact, f"{part}={_text(part, found | said)}")
            found |= said
        elif value is kind or (part not in PLACES and part in found):
            del found[part]
            if value is not None:
                remedy = f"{part}=autoptd.{kind.__name__}(...)"
                raise PlanError(f"{part}={reprlib.repr(value)}", f"is {a_type(value)}", remedy)
    if old:
        parts = dict.fromkeys(map(OLD.__getitem__, old))
        now = ", ".join(f"{part}={_text(part, found)}" for part in parts)
        text = f"deprecated: {'=, '.join(old)}=; write {now}"
        # At the caller of `parallelize`, `compile` or `verify`.
        warnings.warn(text, FutureWarning, stacklevel=3)
    return found


def _said(value: Any, part: str, places: tuple[Setting, ...]) -> dict[str, Any]:
    """Return the settings of a record that differ from its defaults or from those of `Options`: `Zero()` means
    stage 1, but without a record the stage is 0.
    """
    unset = getattr(Options, part)
    said = {place.name: getattr(value, place.field) for place in places}
    found = {
        place.name: said[place.name]
        for place in places
        if not said[place.name] == place.default == getattr(unset, place.field)
    }
    # In JSON's types, to compare it with a plan.
    return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}


def _text(part: str, keywords: Mapping[str, Any]) -> str:
    """Write a record as a user would: the setting with the name of the keyword comes first, without a name."""
    kind, places = PARTS[part]
    asked = [(place, keywords[place.name]) for place in places if keywords.get(place.name) is not None]
    items = [repr(value) if place.name == part else f"{place.field}={value!r}" for place, value in asked]
    return f"{kind.__name__}({', '.join(items)})"


def grouped(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords of `parallelize` for settings by their flat names."""
    others = {name: value for name, value in keywords.items() if not (name in PLACES and PLACES[name][0])}
    return others | _parts(keywords)


def _parts(keywords: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for part, (_, places) in PARTS.items():
        given = [(place.field, keywords[place.name]) for place in places if place.name in keywords]
        if asked := {name: value for name, value in given if value is not None}:
            found[part] = replace(getattr(Options, part), **asked)
    return found


def make_options(*, plan: Any = None, **keywords: Any) -> Options:
    """Return Options for settings by their flat names; refuse what does not exist yet.

    `plan` is a dict or the path of a plan.json; a setting may not contradict it. One that is None is left
    out.
    """
    # Before unknown keywords: `summa=True` is known here, and refused by its feature's name.
    keywords = without_missing(keywords, KEYWORDS)
    for name in keywords:
        if name not in KEYWORDS:
            raise PlanError(
                f"{name}=", "no such keyword", remedy_for(name) or nearest(name, sorted(KEYWORDS))
            )
    keywords = {name: value for name, value in keywords.items() if value is not None}
    # In a plan's types, to compare the two.
    if isinstance(keywords.get("schedule"), os.PathLike):
        keywords["schedule"] = os.fspath(keywords["schedule"])
    if "machine" in keywords:
        keywords["machine"] = machine_record(keywords["machine"])
    if plan is None:
        return _options(keywords)
    in_plan = frozenset(name for name, known in KEYWORDS.items() if known.is_planned)
    planned, pinned = read_plan(plan, keywords, in_plan)
    planned = {name: value for name, value in planned.items() if value is not None}
    # Keywords win, and can only repeat the plan: `read_plan` refused those that contradict it.
    return replace(_options({**planned, **keywords}), plan=pinned)


def _options(asked: Mapping[str, Any]) -> Options:
    own = grouped(relieved(asked))
    if "memory" in own:
        own["memory"] = check_memory(own["memory"])
    if "schedule" not in own:
        own["schedule"] = "interleaved" if own.get("v", 1) != 1 else "1f1b"
    if isinstance(own["schedule"], str) and is_path(own["schedule"]):
        own["schedule"] = Path(own["schedule"])
    return Options(**own)


# Settings that only go with some choices; if one of them is given, the choice is not made here.
NEEDS_ZERO, NEEDS_RECOMPUTE = ("dp_shard", "reduce_dtype"), ("recompute_num_layers",)


def relieved(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with "auto" for those that can save memory and were not given, if `memory` is bounded.

    How it is chosen: compiler/memory_search.py.
    """
    if given.get("memory") is None:
        return dict(given)
    chosen = {"sequence_parallel": "auto"}
    if not any(given.get(name) for name in NEEDS_ZERO):
        chosen["zero"] = "auto"
    # torch's compiler decides itself what to save within a layer.
    if given.get("fuse") != "inductor" and not any(given.get(name) for name in NEEDS_RECOMPUTE):
        chosen["recompute"] = "auto"
    return {**chosen, **given}


__all__ = ["KEYWORDS", "OLD", "PARTS", "flat", "grouped", "make_options", "settings"]
