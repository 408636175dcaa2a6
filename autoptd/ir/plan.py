"""A plan written by hand, or saved by an earlier program: `plan=` of `parallelize`.

In: a dict, or the path of a plan.json or its directory. Out: keywords of `Options`, and a `Plan` with the
pinned decisions. Every key is optional:

    {"version": 1, "mesh": {"t": 2, "p": 4}, "num_microbatches": 8, "schedule": "1f1b",
     "options": {"seed": 1},
     "cut": [3, 4, 4, 1],
     "shard": [{"pattern": "h.*.mlp.c_fc.weight", "dim": 0, "axis": "tp"}],
     "keep": [{"pattern": "h.*.mlp.gelu", "way": "again"}]}

`cut` has the layers of each stage, or the p*v - 1 modules to cut after: ["h.2", "h.6", "h.10"]; `shard` is
explained in `passes/solve/shard_pins.py`, the entries of `keep` with a pattern in `passes/kept/requested.py`. The
others are prices that a pipeline rank pays to save a byte less per microbatch, with recompute="auto"
(`ir/kept.py`):

    {"rank": 0, "price": 0.0, "more": 1e-9, "share": 0.25}

`fallbacks`, `relief` (the choices made to fit into `memory=`), `weighed` (a comparison with the known plans
over tp: program/weighed.py) and `planner` (the planner's reasons: wings/planner/plan.py) are reports and pin
nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from autoptd.errors import PlanError, a_type
from autoptd.ir.kept import KeepPin, Rate, read_keep
from autoptd.ir.mesh import DEGREES

VERSION = 1
KEYS = (
    "version",
    "mesh",
    "num_microbatches",
    "schedule",
    "options",
    "cut",
    "shard",
    "keep",
    "fallbacks",
    "relief",
    "weighed",
    "planner",
)
MESH = (*DEGREES, "v", "order")
JSON_KINDS = {"mesh": dict, "options": dict, "cut": list, "shard": list, "keep": list}


@dataclass(frozen=True)
class Plan:
    """The pinned decisions: `cut`, numbers of layers or names (`passes/stages/cut_pins.py`), `shard`
    (`solve/shard_pins.py`), `rates`, one per pipeline rank, and how values are kept (`passes/kept/requested.py`).
    """

    cut: tuple[int, ...] | tuple[str, ...] | None = None
    shard: tuple[Mapping[str, Any], ...] = ()
    rates: tuple[Rate, ...] = ()
    keep: tuple[KeepPin, ...] = ()


def read_plan(
    given: Any, keywords: Mapping[str, Any], options: frozenset[str]
) -> tuple[dict[str, Any], Plan]:
    """Return the keywords in a plan, and its pins.

    `keywords` are those passed along with it: PlanError if both set one and disagree. `options` are the
    allowed keys of the plan's `options`.
    """
    plan = load_plan(given)
    check_known("plan", plan, KEYS)
    if plan.get("version", VERSION) != VERSION:
        fact = f"has version {plan['version']!r}; this AutoPTD reads version {VERSION}"
        raise PlanError("plan", fact, "save the plan again: program.save(folder)")
    for key, kind in JSON_KINDS.items():
        if key in plan and not isinstance(plan[key], kind):
            remedy = "a JSON object" if kind is dict else "a JSON list"
            raise PlanError(f"plan: {key}", f"is {plan[key]!r}", remedy)
    check_known("plan: mesh", plan.get("mesh", {}), MESH)
    check_known("plan: options", plan.get("options", {}), sorted(options))
    planned = {**plan.get("mesh", {}), **plan.get("options", {})}
    planned |= {key: plan[key] for key in ("num_microbatches", "schedule") if plan.get(key) is not None}
    # A keyword may repeat the plan, but not contradict it.
    for name, value in planned.items():
        if keywords.get(name) is not None and keywords[name] != value:
            fact = f"the plan sets {name}={value!r}, the keyword {name}={keywords[name]!r}"
            raise PlanError(f"plan and {name}=", fact, "leave one of them out")
    rates, pins = read_keep(plan.get("keep", ()))
    return planned, Plan(_cut(plan.get("cut")), tuple(plan.get("shard", ())), rates, pins)


def check_known(site: str, record: Mapping[str, Any], known: Any) -> None:
    """Raise PlanError for a key that is not in `known`, with the most similar ones."""
    for key in record:
        if key not in known:
            raise PlanError(site, f"unknown key {key!r}", nearest(str(key), known))


def nearest(name: str, known: Any, most: int = 4) -> str:
    """Format the names most similar to `name`: `one of a, b, c`."""
    names = get_close_matches(name, list(known), n=most, cutoff=0.4) or list(known)[: 2 * most]
    if len(names) > 1:
        return f"one of {', '.join(names)}"
    return names[0] if names else "none: leave it out"


def load_plan(given: Any) -> dict[str, Any]:
    """Return the plan in a dict, a plan.json or its directory, unchecked; PlanError if there is none."""
    plan = given
    if isinstance(given, (str, Path)):
        path = Path(given)
        path = path / "plan.json" if path.is_dir() else path
        try:
            plan = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            fact = f"cannot be read: {error}"
            raise PlanError(f"plan={str(given)!r}", fact, "pass the path of a plan.json") from error
    if not isinstance(plan, dict):
        raise PlanError("plan", f"is {a_type(plan)}", "pass a dict or the path of a plan.json")
    return plan


def _cut(given: list[Any] | None) -> tuple[int, ...] | tuple[str, ...] | None:
    """Check the pinned cut: layers per stage, or names of modules to cut after."""
    if given is None:
        return None
    # True is an int, but not a number of layers.
    is_number = [isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in given]
    if (given and all(is_number)) or all(isinstance(item, str) for item in given):
        return tuple(given)
    remedy = "layers per stage ([3, 4, 4, 1]) or names of modules to cut after (['h.2', 'h.6'])"
    raise PlanError("plan: cut", f"is {given!r}", remedy)
