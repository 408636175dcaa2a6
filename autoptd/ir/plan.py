"""A plan given by hand, or saved by a program before: `plan=` of `parallelize`.

In: a dict, or the path of a plan.json (or of the folder that has it). Out: keywords of `Options`, and a `Plan`: the decisions
that are pinned. Every key is optional:

    {"version": 1, "mesh": {"t": 2, "p": 4}, "num_microbatches": 8, "schedule": "1f1b", "options": {"seed": 1},
     "cut": [3, 4, 4, 1],                   # layers per stage, or the p*v - 1 modules to cut behind: ["h.2", "h.6", "h.10"]
     "shard": [{"pattern": "h.*.mlp.c_fc.weight", "dim": 0, "axis": "tp"}]}      # see `passes/solve/shard_pins.py`

`fallbacks`, `weighed` (the plan over tp beside those that are known: program/weighed.py) and `planner` (why the planner chose
this: planner/plan.py) are reports and ask for nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from autoptd.errors import PlanError

VERSION = 1
KEYS = (
    "version",
    "mesh",
    "num_microbatches",
    "schedule",
    "options",
    "cut",
    "shard",
    "fallbacks",
    "weighed",
    "planner",
)
MESH = ("t", "p", "d", "v", "order")


@dataclass(frozen=True)
class Plan:
    """What is pinned: `cut`, numbers of layers or names (`passes/stages/cut_pins.py`), and `shard` (`solve/shard_pins.py`)."""

    cut: tuple[int, ...] | tuple[str, ...] | None = None
    shard: tuple[Mapping[str, Any], ...] = ()


def read_plan(
    given: Any, keywords: Mapping[str, Any], options: frozenset[str]
) -> tuple[dict[str, Any], Plan]:
    """The keywords that the plan stands for, and what it pins.

    `keywords` are those that were passed beside it: where both speak they must agree. `options` are the keys that the plan's
    `options` may have.
    """
    plan = load_plan(given)
    check_known("plan", plan, KEYS)
    if plan.get("version", VERSION) != VERSION:
        fact = f"is version {plan['version']!r}, this AutoPTD reads version {VERSION}"
        raise PlanError("plan", fact, "save the plan again: program.save(folder)")
    for key, kind in (("mesh", dict), ("options", dict), ("cut", list), ("shard", list)):
        if key in plan and not isinstance(plan[key], kind):
            raise PlanError(
                f"plan: {key}", f"is {plan[key]!r}", f"a JSON {'object' if kind is dict else 'list'}"
            )
    check_known("plan: mesh", plan.get("mesh", {}), MESH)
    check_known("plan: options", plan.get("options", {}), sorted(options))
    said = {**plan.get("mesh", {}), **plan.get("options", {})}
    said |= {key: plan[key] for key in ("num_microbatches", "schedule") if plan.get(key) is not None}
    for name, value in said.items():
        if keywords.get(name) is not None and keywords[name] != value:
            fact = f"the plan says {name}={value!r}, the keyword {name}={keywords[name]!r}"
            raise PlanError(f"plan and {name}=", fact, "leave one of the two out")
    return said, Plan(_cut(plan.get("cut")), tuple(plan.get("shard", ())))


def check_known(site: str, record: Mapping[str, Any], known: Any) -> None:
    """PlanError for a key that does not exist, with the ones that are nearest to it."""
    for key in record:
        if key not in known:
            raise PlanError(site, f"unknown key {key!r}", nearest(str(key), known))


def nearest(name: str, known: Any, most: int = 4) -> str:
    """`one of a, b, c`: the names that look most like `name`."""
    found = get_close_matches(name, list(known), n=most, cutoff=0.4) or list(known)[: 2 * most]
    return (
        f"one of {', '.join(found)}" if len(found) > 1 else f"{found[0]}" if found else "none: leave it out"
    )


def load_plan(given: Any) -> dict[str, Any]:
    """The plan in a dict, a plan.json, or a folder that has one, unchecked; PlanError where there is none."""
    plan = given
    if isinstance(given, (str, Path)):
        path = Path(given)
        path = path / "plan.json" if path.is_dir() else path
        try:
            plan = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise PlanError(
                f"plan={str(given)!r}", f"cannot be read: {error}", "the path of a plan.json"
            ) from error
    if not isinstance(plan, dict):
        raise PlanError("plan", f"is a {type(plan).__name__}", "a dict, or the path of a plan.json")
    return plan


def _cut(given: list[Any] | None) -> tuple[int, ...] | tuple[str, ...] | None:
    if given is None:
        return None
    is_number = [isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in given]
    if (given and all(is_number)) or all(isinstance(one, str) for one in given):
        return tuple(given)
    remedy = "numbers of layers per stage ([3, 4, 4, 1]) or names of modules to cut behind (['h.2', 'h.6'])"
    raise PlanError("plan: cut", f"is {given!r}", remedy)
