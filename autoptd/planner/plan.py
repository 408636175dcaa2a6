"""Which (t, p, d, v, b) to run a model with, and why: a search over what `predict` says.

In: a model or its shape, GPUs, a cluster, a batch. Out: a `Plan`: the best candidates in order with their time and memory taken
apart, how many others were rejected for which reason, and a plan.json that `parallelize(model, plan=...)` runs.

    found = plan({"layers": 128, "hidden": 25600, "heads": 160, "seq": 2048}, gpus=3072, cluster="dgx-a100", batch=3072,
                 recompute="full", precision="bf16")
    print(found)                      # a table
    print(found.explain())            # why
    found.save("plan.json")
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from autoptd.errors import PlanError
from autoptd.planner import advice
from autoptd.planner.choice import Choice
from autoptd.planner.default import DefaultModel
from autoptd.planner.explain import explain_plan
from autoptd.planner.model_shape import shape_of
from autoptd.planner.ranked import RankedChoices, rows_of
from autoptd.planner.request import make_request
from autoptd.planner.search import Found, search
from autoptd.planner.tables import plan_table

# Of the best that are simulated.
FEW = 3
# Candidates that the simulated ones come from.
POOL = 48
# Of all simulations together, but for the first: some 0.3 s.
MOST_ACTIONS = 40_000


class Plan(RankedChoices):
    """What the planner found, to print, to explain and to save: `choices`, the best first."""

    def record(self, rank: int = 0) -> dict[str, Any]:
        """plan.json of a choice, the best by default: a dict that `parallelize(model, plan=...)` takes."""
        return self.choices[rank].plan_record()

    def save(self, path: str | Path, rank: int = 0) -> None:
        """Write plan.json of a choice."""
        Path(path).write_text(json.dumps(self.record(rank), indent=1) + "\n")

    def explain(self) -> str:
        """Why this choice: the term that decided, the runners-up, and which of SC'21's takeaways holds."""
        return explain_plan(self)

    def __str__(self) -> str:
        return plan_table(self)


def plan(
    model_or_shape: Any,
    *,
    gpus: int,
    cluster: Any = "dgx-a100",
    batch: int,
    keep: int = 10,
    **wishes: Any,
) -> Plan:
    """Find the fastest ways to train on exactly `gpus` GPUs with `batch` sequences a step; the `keep` best are returned.

    `model_or_shape`: a `Shape`, a mapping with its fields, or a model with a `config` (nanoGPT's, Hugging Face's). `cluster`: a
    name of autoptd/machines, a TOML file, a `Cluster`. Wishes: `t`, `p`, `d`, `v`, `c`, `microbatch` (a number, or
    several that may be), `recompute` ("none", "selective", "full:1/4", "full:1/2", "full:3/4", "full": a share of each stage's
    layers), `sequence_parallel`, `zero` (0 to 3), each a value, a tuple of values to try, or "any"; `precision`, `schedule` (a
    name, several, or "any" for zero bubble and breadth first as well; without it 1f1b and interleaved), `software`, `memory`
    (bytes of a GPU), and `placement="any"` for every placement of axes on the nodes. What the runtime does not have yet is
    tried only if asked for. PlanError says what would fit where nothing does.
    """
    if keep < 1:
        raise PlanError(f"keep={keep}", "nothing would be returned", "keep=10")
    request = make_request(shape_of(model_or_shape), gpus=gpus, cluster=cluster, batch=batch, **wishes)
    model = DefaultModel(request)
    found = search(model, max(keep, POOL), request.only)
    if not len(found):
        raise PlanError("plan", *advice.what_would_fit(request, found))
    choices, found = _fitting(model, found, keep)
    return Plan(choices, found, model, request.only, gpus, request.cluster.gpus_per_node)


def _fitting(model: DefaultModel, found: Found, keep: int) -> tuple[tuple[Choice, ...], Found]:
    """The best choices that fit with their schedule simulated, and the search that they are of.

    Where none of those that the formulas let pass does, the formulas are given as much less memory as they were wrong by.
    """
    asked = request = model.request
    while len(found):
        choices, held = _simulated(model, found, keep)
        if choices:
            return choices, found
        least = min(held, key=lambda at: held[at].bytes)
        too_large = min(float(found.memory[at]) / one.bytes for at, one in held.items())
        request = request.but(memory_bytes=asked.memory_bytes * too_large)
        told = f"{held[least].name}, needs {held[least].bytes / 1e9:,.1f} of {asked.memory_bytes / 1e9:,.1f} GB"
        found = search(DefaultModel(request), max(keep, POOL), request.only)
    _, remedy = advice.what_would_fit(request, found)
    where = f"{advice.counted(asked.gpus)} of {asked.cluster.name}"
    raise PlanError("plan", f"nothing fits on {where}: the smallest that was simulated, {told}", remedy)


def _simulated(model: DefaultModel, found: Found, keep: int) -> tuple[tuple[Choice, ...], dict[int, Choice]]:
    """The best choices, of which those that lead have had their schedule simulated, and all that were, by their place.

    Simulated is until `FEW` lead, or that takes long and the first has been; none is returned where none of these fits.
    """
    rows, known = rows_of(found), dict[int, Choice]()

    def rank(at: int) -> tuple[bool, float, int]:
        held, seconds = (known[at].bytes, known[at].seconds) if at in known else (found.memory[at], found.seconds[at])
        return bool(held > model.capacity_bytes), float(seconds), at

    order, spent = list(range(len(rows))), 0
    while (at := next((at for at in order[:FEW] if at not in known), None)) is not None:
        spent += model.actions(rows[at])
        if order[0] in known and not rank(order[0])[0] and spent > MOST_ACTIONS:
            break
        known[at] = model.simulated(rows[at])
        order.sort(key=rank)
    fitting = [at for at in order if not rank(at)[0]]
    return tuple(known.get(at) or model.choice(rows[at]) for at in fitting[:keep]), known


__all__ = ["Plan", "plan"]
