"""Search for the (t, p, d, v, b) to run a model with, and explain it, using the predictions of `predict`.

In: a model or its shape, GPUs, a cluster, a batch. Out: a `Plan`: the best candidates in order with their
time and memory by term, how many others were rejected for which reason, and a plan.json that
`parallelize(model, plan=...)` runs.

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
from autoptd.wings.planner import advice
from autoptd.wings.planner.candidate import Candidate
from autoptd.wings.planner.default import DefaultModel
from autoptd.wings.planner.explain import explain_plan
from autoptd.wings.planner.model_shape import shape_of
from autoptd.wings.planner.ranked import RankedCandidates, rows_of
from autoptd.wings.planner.request import make_request
from autoptd.wings.planner.search import Found, search
from autoptd.wings.planner.tables import plan_table

# How many of the best must have been simulated.
SIMULATED = 3
# How many candidates the search returns, from which the simulated ones come.
POOL = 48
# Actions of all simulations together, but for the first: some 0.3 s.
MAX_ACTIONS = 40_000


class Plan(RankedCandidates):
    """What the planner found, to print, to explain and to save: `candidates`, the best first."""

    def record(self, rank: int = 0) -> dict[str, Any]:
        """Return plan.json of a candidate, the best by default: a dict that `parallelize(model,
        plan=...)` takes.
        """
        return self.candidates[rank].plan_record()

    def save(self, path: str | Path, rank: int = 0) -> None:
        """Write plan.json of a candidate."""
        Path(path).write_text(json.dumps(self.record(rank), indent=1) + "\n")

    def explain(self) -> str:
        """Say why this plan: the term that decided, the runners-up, and which of SC'21's takeaways holds."""
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
    **constraints: Any,
) -> Plan:
    """Find the fastest ways to train on exactly `gpus` GPUs with `batch` sequences a step.

    The `keep` best are returned.

    `model_or_shape`: a `Shape`, a mapping with its fields, or a model with a `config` (nanoGPT's, Hugging
    Face's). `cluster`: a name of autoptd/machines, a TOML file, a `Cluster`. Constraints: `t`, `p`, `d`, `v`,
    `c`, `microbatch` (a number, or several that may be), `recompute` ("none", "selective", "full:1/4",
    "full:1/2", "full:3/4", "full": a share of each stage's layers), `sequence_parallel`, `zero` (0 to 3),
    each a value, a tuple of values to try, or "any"; `precision`, `schedule` (a name, several, or "any" for
    zero bubble and breadth first as well; without it 1f1b and interleaved), `software`, `memory` (bytes of a
    GPU), and `placement="any"` for every placement of axes on the nodes. What the runtime does not have yet
    is tried only if asked for. PlanError says what would fit where nothing does.
    """
    if keep < 1:
        raise PlanError(f"keep={keep}", "nothing would be returned", "keep=10")
    request = make_request(shape_of(model_or_shape), gpus=gpus, cluster=cluster, batch=batch, **constraints)
    model = DefaultModel(request)
    found = search(model, max(keep, POOL), request.only)
    if not len(found):
        raise PlanError("plan", *advice.what_would_fit(request, found))
    candidates, found = _fitting(model, found, keep)
    return Plan(candidates, found, model, request.only, gpus, request.cluster.gpus_per_node)


def _fitting(model: DefaultModel, found: Found, keep: int) -> tuple[tuple[Candidate, ...], Found]:
    """Return the best candidates that fit with their schedule simulated, and the search that found them.

    If no candidate that fits by the formulas does, search again with the memory reduced by the formulas'
    error.
    """
    original = request = model.request
    while len(found):
        candidates, held = _simulated(model, found, keep)
        if candidates:
            return candidates, found
        # Below 1: a simulated candidate holds more than its formula predicts. Each round has less memory, so
        # this ends.
        least = min(held, key=lambda at: held[at].bytes)
        too_large = min(float(found.memory[at]) / candidate.bytes for at, candidate in held.items())
        request = request.but(memory_bytes=original.memory_bytes * too_large)
        needs = f"{held[least].name}, needs {held[least].bytes / 1e9:,.1f} of {original.memory_bytes / 1e9:,.1f} GB"
        found = search(DefaultModel(request), max(keep, POOL), request.only)
    _, remedy = advice.what_would_fit(request, found)
    where = f"{advice.counted(original.gpus)} of {original.cluster.name}"
    raise PlanError("plan", f"nothing fits on {where}: the smallest that was simulated, {needs}", remedy)


def _simulated(
    model: DefaultModel, found: Found, keep: int
) -> tuple[tuple[Candidate, ...], dict[int, Candidate]]:
    """Simulate the schedules of the leading candidates.

    Return the best, and all that were simulated by their place.

    Simulations go on until the first `SIMULATED` places are held by simulated ones, or until they take long
    and the first place is. Nothing is returned where nothing that was simulated fits.
    """
    rows, known = rows_of(found), dict[int, Candidate]()

    def rank(at: int) -> tuple[bool, float, int]:
        # By the formulas, until its schedule was simulated: then that counts.
        held, seconds = found.memory[at], found.seconds[at]
        if at in known:
            held, seconds = known[at].bytes, known[at].seconds
        return bool(held > model.capacity_bytes), float(seconds), at

    order, spent = list(range(len(rows))), 0
    while unknown := [at for at in order[:SIMULATED] if at not in known]:
        at = unknown[0]
        spent += model.actions(rows[at])
        if order[0] in known and not rank(order[0])[0] and spent > MAX_ACTIONS:
            break
        known[at] = model.simulated(rows[at])
        order.sort(key=rank)
    fitting = [at for at in order if not rank(at)[0]]
    return tuple(known.get(at) or model.candidate(rows[at]) for at in fitting[:keep]), known


__all__ = ["Plan", "plan"]
