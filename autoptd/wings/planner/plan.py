"""Search for the (t, p, d, v, b) to run a model with, using the predictions of `predict`, and present the result.

In: a model or its shape, GPUs, a cluster, a batch. Out: a `Plan`: the best candidates in order with their time and
memory by term, the number of rejected ones by reason, and a plan.json that `parallelize(model, plan=...)` runs. If
nothing fits, the PlanError suggests changes of the request, each verified by a search and named with its plan.
`which_when` compares the plans for one GPU, one node, all GPUs and a slow network.

    found = plan({"layers": 128, "hidden": 25600, "heads": 160, "seq": 2048}, gpus=3072, cluster="dgx-a100", batch=3072,
                 recompute="full", precision="bf16")
    print(found)                      # a table
    print(found.explain())            # why
    found.save("plan.json")

The table has seconds of a step, TFLOP/s per GPU, GB (1e9 bytes) of the fullest GPU, and the share of each term of the
seconds. The explanation names the term that decides against the runner-up, and checks the three takeaways of Narayanan
et al. (SC'21, section 3), each against the best plan that does not follow it, within the request or, if nothing in it
fits, among all degrees. All numbers are from the same model, most from another search.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from autoptd.errors import PlanError
from autoptd.wings.planner.candidates import Candidate, DefaultModel, is_missing, rows_of
from autoptd.wings.planner.cluster import Cluster, find_cluster
from autoptd.wings.planner.counts import recipe_text
from autoptd.wings.planner.request import Request, make_request
from autoptd.wings.planner.search import Columns, Filter, Found, search
from autoptd.wings.planner.setting import RECOMPUTE
from autoptd.wings.planner.shape import shape_of
from autoptd.wings.words import aligned

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
# Term -> its column.
NAMES = {
    "compute": "compute",
    "recompute": "recompute",
    "tp_comm": "tensor",
    "pp_comm": "pipeline",
    "bubble": "bubble",
    "dp_comm": "data",
    "optimizer": "optimizer",
}
# Term -> its words.
MEANING = {
    "compute": "computation",
    "recompute": "recomputation of activations",
    "tp_comm": "communication of tensor ranks",
    "pp_comm": "messages between pipeline stages",
    "bubble": "the pipeline bubble",
    "dp_comm": "communication of data ranks",
    "optimizer": "the optimizer",
}


@dataclass(frozen=True)
class Plan:
    """The plans that were found, to print, to explain and to save: `candidates`, the best first.

    `found` has the counts of the search, `model` the problem, for further searches.
    """

    candidates: tuple[Candidate, ...]
    found: Found
    model: DefaultModel

    @property
    def best(self) -> Candidate:
        return self.candidates[0]

    @property
    def gpus(self) -> int:
        return self.model.request.gpus

    @property
    def node(self) -> int:
        """GPUs on a fast network."""
        return self.model.request.cluster.gpus_per_node

    @property
    def capacity_bytes(self) -> float:
        """The memory of a GPU."""
        return self.model.capacity_bytes

    @property
    def rejected(self) -> Mapping[str, int]:
        """The number of rejected configurations by reason."""
        return self.found.rejected

    def fastest(self, only: Filter, is_free: bool = False) -> Candidate | None:
        """Return the best candidate that `only` accepts, by the closed formulas; None if none fits.

        The degrees of the request are constraints, unless `is_free`.
        """
        request = self.model.request

        def both(configs: Columns) -> np.ndarray:
            return only(configs) & request.only(configs)

        # A new search: the best few may have none of that kind.
        found = search(self.model, 1, only if is_free else both)
        return self.model.candidate(rows_of(found)[0]) if len(found) else None

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
    return Plan(candidates, found, model)


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


# advice if nothing fits


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


# the table and the explanation


def plan_table(plan: Plan) -> str:
    """Return the table of the candidates, best first, and the counts of the rest."""
    used: set[str] = set()
    for candidate in plan.candidates:
        used |= {name for name, seconds in candidate.seconds_by.items() if seconds}
    # No column for a term that is 0 in all candidates.
    terms = [name for name in NAMES if name in used]
    head = ["", "seconds", "TFLOP/s", "GB", *(NAMES[name] for name in terms), "plan"]
    rows = [head, *(_row(rank, candidate, terms) for rank, candidate in enumerate(plan.candidates, 1))]
    lines = aligned(rows, right=range(len(head) - 1))
    if any(not candidate.is_simulated for candidate in plan.candidates):
        lines.append("~ by the closed formulas, schedule not simulated")
    missing: dict[str, None] = {}
    for candidate in plan.candidates:
        missing |= dict.fromkeys(candidate.not_yet)
    if missing:
        lines.append(
            f"* needs features that the runtime does not have yet, and plan.json omits: {', '.join(missing)}"
        )
    return "\n".join([_basis(plan), *lines, "", *count_lines(plan)])


def _basis(plan: Plan) -> str:
    """Return the recipe and the machine of the numbers."""
    request = plan.model.request
    cluster = request.cluster
    recipe = recipe_text(request.precision, cluster.software)
    return f"Recipe: {recipe}. Machine: {cluster.name}, {plan.gpus} GPUs"


def _row(rank: int, candidate: Candidate, terms: Sequence[str]) -> list[str]:
    shares = [f"{100 * candidate.seconds_by.get(name, 0.0) / candidate.seconds:.1f}%" for name in terms]
    rate, held = f"{candidate.flops_per_gpu / 1e12:.1f}", f"{candidate.bytes / 1e9:.1f}"
    # The tilde is explained below the table.
    seconds = f"{'' if candidate.is_simulated else '~'}{candidate.seconds:.4g}"
    name = candidate.name + (" *" if candidate.not_yet else "")
    return [str(rank), seconds, rate, held, *shares, name]


def settings_text(settings: Mapping[str, Any]) -> str:
    """Return `recompute=full, zero=1`."""
    return ", ".join(f"{name}={value}" for name, value in settings.items())


def memory_text(held: Mapping[str, float]) -> str:
    """Return `weights 7.9 GB, optimizer 2.9 GB`, the largest first."""
    parts = sorted(held.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {value / 1e9:.1f} GB" for name, value in parts if value)


def count_lines(plan: Plan) -> list[str]:
    """Return the number of configurations, and of those that were rejected by reason."""
    found = plan.found
    lines = [
        f"{found.configs:,} combinations of degrees, microbatch and switches, {found.fitting:,} fit; "
        f"{found.evaluated:,} candidates timed, {found.bounded:,} combinations excluded by a bound",
    ]
    for reason, count in sorted(found.rejected.items(), key=lambda item: -item[1]):
        lines.append(f"{count:9,d}  {reason}")
    return lines


@dataclass(frozen=True)
class Other:
    """The best plan of another kind, None if none fits; `is_allowed`: it meets the request's constraints."""

    candidate: Candidate | None
    is_allowed: bool = True


def explain_plan(plan: Plan) -> str:
    """Explain a plan's best candidate."""
    lines = [*_chosen(plan), *_against_the_next(plan), *takeaways(plan)]
    if plan.best.not_yet:
        lines.append(
            f"Not in the runtime yet, and omitted from plan.json: {settings_text(plan.best.not_yet)}."
        )
    return "\n".join(lines)


def _chosen(plan: Plan) -> list[str]:
    best = plan.best
    largest = sorted(best.seconds_by.items(), key=lambda item: -item[1])
    shares = ", ".join(
        f"{MEANING[name]} {_percent(value / best.seconds)}" for name, value in largest if value
    )
    filled = _percent(best.bytes / plan.capacity_bytes)
    return [
        f"Chosen: {best.name}: {best.seconds:.4g} s a step, {best.flops_per_gpu / 1e12:.1f} TFLOP/s per GPU.",
        f"Its time: {shares}.",
        f"Its fullest GPU holds {best.bytes / 1e9:.1f} GB, {filled} of its memory: {memory_text(best.bytes_by)}.",
    ]


def _against_the_next(plan: Plan) -> list[str]:
    """Compare the best with the runner-up, and their distance with the error of the model."""
    if len(plan.candidates) < 2:
        return ["No other plan fits."]
    best, other, error = plan.best, plan.candidates[1], plan.model.uncertainty
    gap = other.seconds / best.seconds - 1
    lines = [f"Next: {other.name}: {other.seconds:.4g} s, {_percent(gap)} more.{_decided(best, other)}"]
    if math.isinf(error):
        unknown = "The error of predictions is not known for this cluster, software and precision: none was measured"
        return [*lines, f"{unknown}. Measure the first few if it matters."]
    limit = best.seconds * (1 + error)
    close = [candidate for candidate in plan.candidates[1:] if candidate.seconds <= limit]
    if close:
        last = close[-1].seconds / best.seconds - 1
        lines.append(
            f"The errors of two predictions differed by up to {_percent(error)} in measurements: {len(close)} more of "
            f"the {len(plan.candidates)} listed are within that (up to {_percent(last)}); measure them if it matters."
        )
    else:
        lines.append(
            f"The errors of two predictions differed by up to {_percent(error)} in measurements, which is less than "
            "the distance to the next."
        )
    return lines


def _decided(best: Candidate, other: Candidate) -> str:
    """Return the terms in which the other is worst and best."""
    apart = differences(best, other)
    worst = max(apart, key=lambda name: apart[name])
    gain = min(apart, key=lambda name: apart[name])
    # No term is worse: it ties, and comes second by its columns.
    if apart[worst] <= 0:
        return ""
    text = f" The difference is {MEANING[worst]}: {apart[worst]:.3g} s more"
    if apart[gain] < 0:
        text += f", against {-apart[gain]:.3g} s less for {MEANING[gain]}"
    return f"{text}."


def differences(best: Candidate, other: Candidate) -> dict[str, float]:
    """Return the seconds by which the other takes longer, by term."""
    names = dict.fromkeys([*best.seconds_by, *other.seconds_by])
    return {name: other.seconds_by.get(name, 0.0) - best.seconds_by.get(name, 0.0) for name in names}


def takeaways(plan: Plan) -> list[str]:
    """Check SC'21's three takeaways, each against the best plan that does not follow it."""
    if plan.gpus == 1:
        return ["One GPU has nothing to divide: the only choice is the microbatch."]
    return [_tensor_within_a_node(plan), _model_parallel_to_fit(plan), _microbatch(plan)]


def _tensor_within_a_node(plan: Plan) -> str:
    """Check takeaway 1: tensor parallelism up to the GPUs of a node, pipelines across nodes."""
    node, t = plan.node, plan.best.degrees["t"]
    rule = f"SC'21's takeaway 1 (tensor parallelism within a node of {node}, pipelines across)"
    if plan.gpus <= node:
        return f"{rule} does not apply: all GPUs share a node."
    if t <= node:
        other = _best_other(plan, lambda configs: configs["t"] > node)
        # A constraint may have kept t small: then a plan outside of the request is faster.
        holds = "holds within the request" if _is_better(plan, other) else "holds"
        return f"{rule} {holds}: t={t}. With t over {node} {_cost(plan, other)}."
    other = _best_other(plan, lambda configs: configs["t"] <= node)
    return f"{rule} does not hold: t={t} spans nodes. With t up to {node} {_cost(plan, other)}."


def _model_parallel_to_fit(plan: Plan) -> str:
    """Check takeaway 2: as much model parallelism as memory requires, data parallelism for the rest."""
    size = plan.best.degrees["t"] * plan.best.degrees["p"]

    def ranks(configs: Columns) -> np.ndarray:
        return configs["t"] * configs["p"]

    fewer = _best_other(plan, lambda configs: ranks(configs) < size)
    more = _best_other(plan, lambda configs: ranks(configs) > size)
    rule = "SC'21's takeaway 2 (t*p just large enough for memory, data parallelism beyond)"
    if fewer.candidate is None:
        return f"{rule} holds: t*p={size} is the least that fits. With more {_cost(plan, more)}."
    holds = "does not hold" if fewer.is_allowed else "is excluded by the request"
    less = f": less than t*p={size} fits. With less {_cost(plan, fewer)}."
    return f"{rule} {holds}{less} With more {_cost(plan, more)}."


def _microbatch(plan: Plan) -> str:
    """Check takeaway 3: the best microbatch depends on the model, the pipeline and the batch."""
    b = plan.best.degrees["b"]
    larger = _best_other(plan, lambda configs: configs["b"] > b)
    less = ""
    if b > 1:
        smaller = _best_other(plan, lambda configs: configs["b"] < b)
        less = f" With a smaller one {_cost(plan, smaller)}."
    rule = "SC'21's takeaway 3 (the microbatch is a compromise)"
    return f"{rule}: b={b} here.{less} With a larger one {_cost(plan, larger)}."


def _best_other(plan: Plan, only: Filter) -> Other:
    """Return the best that `only` accepts, within the constraints or, if nothing there fits, among all degrees."""
    allowed = plan.fastest(only)
    return Other(allowed) if allowed else Other(plan.fastest(only, is_free=True), is_allowed=False)


def _is_better(plan: Plan, other: Other) -> bool:
    # By the formulas, as only the best plan was simulated.
    return other.candidate is not None and other.candidate.formula_seconds < plan.best.formula_seconds


def _cost(plan: Plan, other: Other) -> str:
    """Return `nothing fits`, or the cost of the best of the others, both by the closed formulas."""
    if other.candidate is None:
        return "nothing fits"
    apart = other.candidate.formula_seconds / plan.best.formula_seconds - 1
    not_asked = "" if other.is_allowed else ", outside of the request"
    direction = "less" if apart < 0 else "more"
    return f"a step takes {_percent(abs(apart))} {direction} ({other.candidate.name}){not_asked}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%" if abs(share) < 0.1 else f"{100 * share:.0f}%"
