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
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from autoptd.errors import PlanError
from autoptd.planner import advice, explain, tables
from autoptd.planner.choice import Choice
from autoptd.planner.default import DefaultModel
from autoptd.planner.model_shape import shape_of
from autoptd.planner.request import make_request
from autoptd.planner.search import Columns, CostModel, Filter, Found, search
from autoptd.planner.subramanian import PUBLISHED, Quirks, SubramanianModel, System, Transformer, find_system

COST_MODELS = ("default", "subramanian")
FEW = 3  # of the best that are simulated
POOL = 48  # candidates that the simulated ones come from
MOST_ACTIONS = 40_000  # of all simulations together, but for the first: some 0.3 s


class PlanModel(CostModel, Protocol):
    """A cost model whose candidates can be told of."""

    @property
    def uncertainty(self) -> float:
        """How far two predictions for one system were off each other, relative; infinity where none was measured."""

    def choice(self, row: Mapping[str, int]) -> Choice:
        """A candidate with its terms."""

    def degrees(self, cells: Columns) -> Columns:
        """t, p, d, b (and others) of cells."""


@dataclass(frozen=True)
class Plan:
    """What the planner found: `choices`, the best first; `found`, the counts of the search.

    `model` and `only` are the problem, for the questions that `explain` asks again. `node`: GPUs on a fast network;
    `capacity_bytes` of a GPU.
    """

    choices: tuple[Choice, ...]
    found: Found
    model: PlanModel
    only: Filter | None
    gpus: int
    node: int

    @property
    def best(self) -> Choice:
        return self.choices[0]

    @property
    def capacity_bytes(self) -> float:
        return self.model.capacity_bytes

    @property
    def rejected(self) -> Mapping[str, int]:
        """Cells (degrees, microbatch, switches) that are no candidates, by reason."""
        return self.found.rejected

    def record(self, rank: int = 0) -> dict[str, Any]:
        """plan.json of a choice, the best by default: a dict that `parallelize(model, plan=...)` takes."""
        return self.choices[rank].plan_record()

    def save(self, path: str | Path, rank: int = 0) -> None:
        """Write plan.json of a choice."""
        Path(path).write_text(json.dumps(self.record(rank), indent=1) + "\n")

    def fastest(self, only: Filter) -> Choice | None:
        """The best choice among the cells that `only` wants too, by the closed formulas; None where none fits."""
        asked = self.only

        def both(cells: Columns) -> np.ndarray:
            return only(cells) if asked is None else only(cells) & asked(cells)

        found = search(self.model, 1, both)
        return self.model.choice(rows_of(found)[0]) if len(found) else None

    def explain(self) -> str:
        """Why this choice: the term that decided, the runners-up, and which of SC'21's takeaways holds."""
        return explain.explain(self)

    def __str__(self) -> str:
        return tables.plan_table(self)


def plan(
    model_or_shape: Any,
    *,
    gpus: int,
    cluster: Any = "dgx-a100",
    batch: int,
    cost_model: str = "default",
    keep: int = 10,
    tensor: str = "1D",
    quirks: Quirks = PUBLISHED,
    **wishes: Any,
) -> Plan:
    """Find the fastest ways to train on exactly `gpus` GPUs with `batch` sequences a step; the `keep` best are returned.

    `model_or_shape`: a `Shape`, a mapping with its fields, or a model with a `config` (nanoGPT's, Hugging Face's). `cluster`: a
    name of autoptd/machines, a TOML file, a `Cluster`. Wishes of the default cost model: `t`, `p`, `d`, `v`, `c`, `microbatch`
    (a number, or several that may be), `recompute` ("none", "selective", "full:1/4", "full:1/2", "full:3/4", "full": a share of
    each stage's layers), `sequence_parallel`, `zero` (0 to 3), each a value, a tuple of values to try, or "any"; `precision`,
    `schedule` (a name, several, or "any" for zero bubble and breadth first as well; without it 1f1b and interleaved),
    `software`, `memory` (bytes of a GPU), and `placement="any"` for every placement of axes on the nodes. What the runtime does
    not have yet is tried only if asked for.

    `cost_model="subramanian"` is the model of arXiv:2410.00273 with the `quirks` of its published code: `cluster` is "A100",
    "H200" or "B200", with "-NVS64" and the like for the size of the fast domain, or a `System`; `tensor` is "1D", "2D" or
    "SUMMA", and there are no other wishes. PlanError says what would fit where nothing does.
    """
    if cost_model not in COST_MODELS:
        raise PlanError(f"cost_model={cost_model!r}", "no such cost model", ", ".join(map(repr, COST_MODELS)))
    if keep < 1:
        raise PlanError(f"keep={keep}", "nothing would be returned", "keep=10")
    if cost_model == "subramanian":
        if wishes:
            raise PlanError(f"{next(iter(wishes))}=", "the subramanian cost model has no such choice", "leave it out")
        return _plan_subramanian(_mapping(model_or_shape), gpus, cluster, batch, keep, tensor, quirks)
    if tensor != "1D":
        raise PlanError(f"tensor={tensor!r}", "the default cost model has 1D only", "cost_model='subramanian'")
    request = make_request(shape_of(model_or_shape), gpus=gpus, cluster=cluster, batch=batch, **wishes)
    model = DefaultModel(request)
    found = search(model, max(keep, POOL), request.only)
    if not len(found):
        raise PlanError("plan", *advice.what_would_fit(request, found))
    choices, found = _fitting(model, found, keep)
    return Plan(choices, found, model, request.only, gpus, request.cluster.gpus_per_node)


def _plan_subramanian(
    shape: Mapping[str, Any], gpus: int, system: Any, batch: int, keep: int, tensor: str, quirks: Quirks
) -> Plan:
    found_system = system if isinstance(system, System) else find_system(system)
    model = SubramanianModel(Transformer.from_shape(shape), found_system, gpus, batch, tensor, quirks)
    found = search(model, keep)
    if not len(found):
        raise PlanError("plan", *advice.what_would_fit_subramanian(model, found))
    choices = tuple(model.choice(row) for row in rows_of(found))
    return Plan(choices, found, model, None, gpus, found_system.domain)


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


def rows_of(found: Found) -> list[dict[str, int]]:
    """The candidates that were found, one mapping each."""
    return [{name: int(values[at]) for name, values in found.columns.items()} for at in range(len(found))]


def _mapping(given: Any) -> Mapping[str, Any]:
    if isinstance(given, Mapping):
        return given
    shape = shape_of(given)
    return {name: getattr(shape, name) for name in ("layers", "hidden", "heads", "seq", "ffn")}


__all__ = ["COST_MODELS", "Plan", "plan", "rows_of"]
