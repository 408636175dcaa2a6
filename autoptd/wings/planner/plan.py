"""Search for the (t, p, d, v, b) to run a model with, using the predictions of `predict`.

In: a model or its shape, GPUs, a cluster, a batch. Out: a `Plan`: the best candidates in order with their time and
memory by term, the number of rejected ones by reason, and a plan.json that `parallelize(model, plan=...)` runs. If
nothing fits, the PlanError suggests changes of the request, each verified by a search and named with its plan.
`which_when` compares the plans for one GPU, one node, all GPUs and a slow network.

    found = plan({"layers": 128, "hidden": 25600, "heads": 160, "seq": 2048}, gpus=3072, cluster="dgx-a100", batch=3072,
                 recompute="full", precision="bf16")
    print(found)                      # a table
    print(found.explain())            # why
    found.save("plan.json")
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autoptd.errors import PlanError
from autoptd.wings.planner.candidates import Candidate, DefaultModel, RankedCandidates, is_missing, rows_of
from autoptd.wings.planner.cluster import Cluster, find_cluster
from autoptd.wings.planner.explain import MEANING, explain_plan, plan_table
from autoptd.wings.planner.request import Request, make_request
from autoptd.wings.planner.search import Found, search
from autoptd.wings.planner.setting import RECOMPUTE
from autoptd.wings.planner.shape import shape_of

# The number of the best plans that are simulated, and of candidates from which they are chosen.
SIMULATED, POOL = 3, 48
# Actions of all simulations together except the first: some 0.3 s.
MAX_ACTIONS = 40_000
# The factor by which the slow network has less bandwidth between nodes.
SLOWDOWN = 10
# Terms in which a GPU works; in the others it waits.
WORK = ("compute", "recompute", "optimizer")
# Column of the search -> keyword of `plan`.
DEGREE_NAMES = {"b": "microbatch", **{name: name for name in "tpdcv"}}
# The GPU counts that are tried if nothing fits: doublings, and smaller ones.
MAX_DOUBLINGS, MAX_FEWER_GPUS = 10, 64


class Plan(RankedCandidates):
    """The plans that were found, to print, to explain and to save: `candidates`, the best first."""

    def record(self, rank: int = 0) -> dict[str, Any]:
        """Return plan.json of a candidate, the best by default: a dict for `parallelize(model, plan=...)`."""
        return self.candidates[rank].plan_record()

    def save(self, path: str | Path, rank: int = 0) -> None:
        """Write plan.json of a candidate."""
        Path(path).write_text(json.dumps(self.record(rank), indent=1) + "\n")

    def explain(self) -> str:
        """Explain the best plan: the term that decided, the runner-up, and which of SC'21's takeaways hold."""
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
    """Find the fastest ways to train on exactly `gpus` GPUs with `batch` sequences a step; return the `keep` best.

    `model_or_shape`: a `Shape`, a mapping with its fields, or a model with a `config` (nanoGPT's, Hugging
    Face's). `cluster`: a name of autoptd/machines, a TOML file, a `Cluster`. Constraints: `t`, `p`, `d`, `v`,
    `c`, `microbatch`, `recompute` ("none", "selective", "full:1/4", "full:1/2", "full:3/4", "full": a share of each
    stage's layers), `sequence_parallel`, `zero` (0 to 3), each a value, a tuple of values to try, or "any";
    `precision`, `schedule` (a name, several, or "any" for zero bubble and breadth first as well; by default 1f1b and
    interleaved), `software`, `memory` (bytes per GPU), and `placement="any"` for every placement of axes on the nodes.
    Features that the runtime does not have yet are tried only on request. If nothing fits, PlanError suggests changes.
    """
    if keep < 1:
        raise PlanError(f"keep={keep}", "would return nothing", "keep=10")
    request = make_request(shape_of(model_or_shape), gpus=gpus, cluster=cluster, batch=batch, **constraints)
    model = DefaultModel(request)
    found = search(model, max(keep, POOL), request.only)
    if not len(found):
        raise PlanError("plan", *what_would_fit(request, found))
    candidates, found = _fitting(model, found, keep)
    return Plan(candidates, found, model, request.only, gpus, request.cluster.gpus_per_node)


def _fitting(model: DefaultModel, found: Found, keep: int) -> tuple[tuple[Candidate, ...], Found]:
    """Return the best candidates that fit when their schedule is simulated, and the search that found them.

    If none does, search again with the memory reduced by the formulas' error.
    """
    original = request = model.request
    while len(found):
        candidates, held = _simulated(model, found, keep)
        if candidates:
            return candidates, found
        # Below 1, as a simulated candidate holds more than its formula predicts: this ends.
        least = min(held, key=lambda at: held[at].bytes)
        too_large = min(float(found.memory[at]) / candidate.bytes for at, candidate in held.items())
        request = request.but(memory_bytes=original.memory_bytes * too_large)
        needs = f"{held[least].name}, needs {held[least].bytes / 1e9:,.1f} of {original.memory_bytes / 1e9:,.1f} GB"
        found = search(DefaultModel(request), max(keep, POOL), request.only)
    _, remedy = what_would_fit(request, found)
    where = f"{counted(original.gpus)} of {original.cluster.name}"
    raise PlanError("plan", f"nothing fits on {where}: the smallest simulated candidate, {needs}", remedy)


def _simulated(
    model: DefaultModel, found: Found, keep: int
) -> tuple[tuple[Candidate, ...], dict[int, Candidate]]:
    """Simulate the leading candidates; return the best, and all simulated ones by their place in the search.

    This ends when the first `SIMULATED` places are simulated, or only the first if simulations take long. Without a
    simulated candidate that fits, there is no best.
    """
    rows, known = rows_of(found), dict[int, Candidate]()

    def rank(at: int) -> tuple[bool, float, int]:
        # A simulation replaces the formulas.
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


@dataclass(frozen=True)
class Case:
    """One case: its name, its GPUs, and the best plan, or the reason why there is none."""

    name: str
    gpus: int
    best: Candidate | None
    fact: str = ""


def which_when(
    model_or_shape: Any, *, gpus: int, cluster: Any = "dgx-a100", batch: int, **constraints: Any
) -> list[Case]:
    """Plan the same model for one GPU, one node, `gpus` GPUs, and those with a network that is ten times slower.

    If a node has `gpus` GPUs, the cases are one GPU and `gpus`.
    """
    here = find_cluster(cluster)
    node = here.gpus_per_node
    cases = [("one GPU", 1, here)]
    if 1 < gpus < node:
        cases.append((f"{gpus} GPUs of a node of {node}", gpus, here))
    elif gpus >= node > 1:
        cases.append((f"one node, {node} GPUs", node, here))
    if gpus > node:
        cases += [
            (f"{gpus} GPUs", gpus, here),
            (f"{gpus} GPUs, network {SLOWDOWN} times slower", gpus, slowed(here)),
        ]
    found = []
    for name, count, where in cases:
        try:
            best = plan(model_or_shape, gpus=count, cluster=where, batch=batch, keep=1, **constraints).best
            found.append(Case(name, count, best))
        # That a model does not fit on one GPU is a result, too.
        except PlanError as error:
            found.append(Case(name, count, None, error.fact))
    return found


def slowed(cluster: Cluster) -> Cluster:
    """Return the cluster with less bandwidth between nodes."""
    return replace(cluster, network=replace(cluster.network, bandwidth=cluster.network.bandwidth / SLOWDOWN))


def cases_text(cases: Sequence[Case]) -> str:
    """Return a line per case, and the effect of the slow network."""
    lines = [f"{case.name}: {_case_text(case)}" for case in cases]
    # Four cases: one GPU, one node, all GPUs, all GPUs on the slow network.
    fast, slow = (cases[-2].best, cases[-1].best) if len(cases) == 4 else (None, None)
    if fast and slow:
        moved = [key for key in ("t", "p", "d", "v", "b") if fast.degrees[key] != slow.degrees[key]]
        changes = ", ".join(f"{key} {fast.degrees[key]} -> {slow.degrees[key]}" for key in moved)
        longer = 100 * (slow.seconds / fast.seconds - 1)
        lines.append(
            f"On the slow network a step takes {longer:.0f}% longer; the plan: {changes or 'the same'}."
        )
    return "\n".join(lines)


def _case_text(case: Case) -> str:
    if case.best is None:
        return case.fact
    best = case.best
    waits = {name: value for name, value in best.seconds_by.items() if name not in WORK and value > 0}
    text = f"{best.name}: {best.seconds:.4g} s, {best.flops_per_gpu / 1e12:.1f} TFLOP/s per GPU"
    if not waits:
        return f"{text}, all of it work"
    most = max(waits, key=lambda name: waits[name])
    return f"{text}; the largest overhead is {MEANING[most]}, {100 * waits[most] / best.seconds:.1f}%"


def what_would_fit(request: Request, found: Found) -> tuple[str, str]:
    """Return fact and remedy if nothing fits: the smallest candidate, and each single change that helps."""
    where = f"{counted(request.gpus)} of {request.cluster.name}"
    capacity = request.memory_bytes / 1e9
    if found.least_memory_config:
        degrees = " ".join(f"{name}={found.least_memory_config[name]}" for name in ("t", "p", "d", "b"))
        needed = f"{found.least_memory / 1e9:,.1f} of {capacity:,.0f} GB"
        fact = f"nothing fits on {where}: the smallest, {degrees}, needs {needed}"
    else:
        reasons = ", ".join(f"{reason} ({count:,} times)" for reason, count in found.rejected.items())
        fact = f"there is no such plan on {where}: {reasons or 'no degrees meet the constraints'}"
    helps = [f"{text}{best}" for text, changed in _changes(request) if (best := _best(changed))]
    more = more_gpus(request)
    if more:
        helps.append(more)
    # No single change of the request helps, but all memory savings together may.
    if len(helps) == bool(more):
        helps += _everything(request, more)
    if not helps:
        counts = range(request.gpus - 1, max(request.gpus - MAX_FEWER_GPUS, 0), -1)
        fewer = next((count for count in counts if _best(request.but(gpus=count))), 0)
        helps = [counted(fewer) if fewer else "a smaller model, or fewer constraints"]
    return fact, "; or ".join(helps)


def _everything(request: Request, more: str) -> list[str]:
    """Return the first of `_savings` that fits, else the first that fits on fewer GPUs than `more`, if any."""
    savings = list(_savings(request))
    for text, changed in savings:
        if found := _best(changed):
            return [text + found]
    for text, changed in savings:
        count = more_gpus(changed)
        if count and count != more:
            return [f"{text}, on {count}"]
    return []


def _savings(request: Request) -> Iterator[tuple[str, Request]]:
    """Yield requests with all memory savings: with the requested degrees, with sequence parallelism too, and with free
    degrees too.
    """
    names = ["recompute='full'", "zero=3"]
    changed = request.but(recompute=("full",), zero=(3,))
    if request.precision == "fp32":
        names.append("precision='bf16'")
        changed = changed.but(precision="bf16")
    mark = _mark("recompute", "full")
    yield f"{_joined(names)} together{mark}", changed
    if True not in request.sequence_parallel:
        names.append("sequence_parallel=True")
        changed = changed.but(sequence_parallel=(True,))
        yield f"{_joined(names)} together{mark}", changed
    if request.pinned:
        degrees = _joined([DEGREE_NAMES[column] for column in request.pinned])
        yield f"{_joined(names)} together{mark} and {degrees} left open", changed.but(pinned={})


def _changes(request: Request) -> Iterator[tuple[str, Request]]:
    """Yield the request with one keyword changed, and the text of the change."""
    for column, values in request.pinned.items():
        free = {key: value for key, value in request.pinned.items() if key != column}
        yield f"another {DEGREE_NAMES[column]} than {' or '.join(map(str, values))}", request.but(pinned=free)
    if True not in request.sequence_parallel:
        yield "sequence_parallel=True", request.but(sequence_parallel=(True,))
    # The cheapest first: each mode recomputes more than the one before.
    for mode in RECOMPUTE[1:]:
        if mode not in request.recompute:
            yield f"recompute={mode!r}{_mark('recompute', mode)}", request.but(recompute=(mode,))
    for stage in (1, 2, 3):
        if stage not in request.zero:
            yield f"zero={stage}{_mark('zero', stage)}", request.but(zero=(stage,))
    if request.precision == "fp32":
        yield f"precision='bf16'{_mark('precision', 'bf16')}", request.but(precision="bf16")


def more_gpus(request: Request) -> str:
    """Return the first doubling of the GPUs on which something fits (`2048 GPUs`), "" if none does."""
    for doublings in range(1, MAX_DOUBLINGS + 1):
        count = request.gpus * 2**doublings
        if _best(request.but(gpus=count)):
            return counted(count)
    return ""


def counted(gpus: int) -> str:
    """Return `1 GPU`, `8 GPUs`."""
    return f"{gpus} GPU{'s' * (gpus != 1)}"


def _best(request: Request) -> str:
    """Return the plan that a search finds: ` (t=8 p=16 d=1 b=1)`, "" if nothing fits."""
    found = search(DefaultModel(request), 1, request.only)
    if not len(found):
        return ""
    return f" ({' '.join(f'{name}={int(found.columns[name][0])}' for name in ('t', 'p', 'd', 'b'))})"


def _mark(keyword: str, value: Any) -> str:
    return " (not in the runtime yet)" if is_missing(keyword, value) else ""


def _joined(words: list[str]) -> str:
    """Return `a, b and c`."""
    return f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else words[0]
