"""Present a plan as text: the ranked table, and why the best is the best.

In: `RankedCandidates`. Out: lines for a terminal. The table has seconds of a step, TFLOP/s per GPU, GB (1e9 bytes) of
the fullest GPU, and the share of each term of the seconds. The explanation names the term that decides against the
runner-up, and checks the three takeaways of Narayanan et al. (SC'21, section 3), each against the best plan that does
not follow it, within the request or, if nothing in it fits, among all degrees. All numbers are from the same model,
most from another search.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autoptd.wings.planner.candidates import Candidate, RankedCandidates
from autoptd.wings.planner.counts import recipe_text
from autoptd.wings.planner.search import Columns, Filter
from autoptd.wings.words import aligned

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
MEANING = {
    "compute": "computation",
    "recompute": "recomputation of activations",
    "tp_comm": "communication of tensor ranks",
    "pp_comm": "messages between pipeline stages",
    "bubble": "the pipeline bubble",
    "dp_comm": "communication of data ranks",
    "optimizer": "the optimizer",
}


def plan_table(plan: RankedCandidates) -> str:
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


def _basis(plan: RankedCandidates) -> str:
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


def count_lines(plan: RankedCandidates) -> list[str]:
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


def explain_plan(plan: RankedCandidates) -> str:
    """Explain a plan's best candidate."""
    lines = [*_chosen(plan), *_against_the_next(plan), *takeaways(plan)]
    if plan.best.not_yet:
        lines.append(
            f"Not in the runtime yet, and omitted from plan.json: {settings_text(plan.best.not_yet)}."
        )
    return "\n".join(lines)


def _chosen(plan: RankedCandidates) -> list[str]:
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


def _against_the_next(plan: RankedCandidates) -> list[str]:
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


def takeaways(plan: RankedCandidates) -> list[str]:
    """Check SC'21's three takeaways, each against the best plan that does not follow it."""
    if plan.gpus == 1:
        return ["One GPU has nothing to divide: the only choice is the microbatch."]
    return [_tensor_within_a_node(plan), _model_parallel_to_fit(plan), _microbatch(plan)]


def _tensor_within_a_node(plan: RankedCandidates) -> str:
    """Check takeaway 1: tensor parallelism up to the GPUs of a node, pipelines across nodes."""
    node, t = plan.node, plan.best.degrees["t"]
    rule = f"SC'21's takeaway 1 (tensor parallelism within a node of {node}, pipelines across)"
    if plan.gpus <= node:
        return f"{rule} does not apply: all GPUs share a node."
    if t <= node:
        other = _best(plan, lambda configs: configs["t"] > node)
        # A constraint may have kept t small: then a plan outside of the request is faster.
        holds = "holds within the request" if _is_better(plan, other) else "holds"
        return f"{rule} {holds}: t={t}. With t over {node} {_cost(plan, other)}."
    other = _best(plan, lambda configs: configs["t"] <= node)
    return f"{rule} does not hold: t={t} spans nodes. With t up to {node} {_cost(plan, other)}."


def _model_parallel_to_fit(plan: RankedCandidates) -> str:
    """Check takeaway 2: as much model parallelism as memory requires, data parallelism for the rest."""
    size = plan.best.degrees["t"] * plan.best.degrees["p"]

    def ranks(configs: Columns) -> np.ndarray:
        return configs["t"] * configs["p"]

    fewer = _best(plan, lambda configs: ranks(configs) < size)
    more = _best(plan, lambda configs: ranks(configs) > size)
    rule = "SC'21's takeaway 2 (t*p just large enough for memory, data parallelism beyond)"
    if fewer.candidate is None:
        return f"{rule} holds: t*p={size} is the least that fits. With more {_cost(plan, more)}."
    holds = "does not hold" if fewer.is_allowed else "is excluded by the request"
    less = f": less than t*p={size} fits. With less {_cost(plan, fewer)}."
    return f"{rule} {holds}{less} With more {_cost(plan, more)}."


def _microbatch(plan: RankedCandidates) -> str:
    """Check takeaway 3: the best microbatch depends on the model, the pipeline and the batch."""
    b = plan.best.degrees["b"]
    larger = _best(plan, lambda configs: configs["b"] > b)
    less = ""
    if b > 1:
        smaller = _best(plan, lambda configs: configs["b"] < b)
        less = f" With a smaller one {_cost(plan, smaller)}."
    rule = "SC'21's takeaway 3 (the microbatch is a compromise)"
    return f"{rule}: b={b} here.{less} With a larger one {_cost(plan, larger)}."


def _best(plan: RankedCandidates, only: Filter) -> Other:
    """Return the best that `only` accepts, within the constraints or, if nothing there fits, among all degrees."""
    # Without the filter of the request, but with its switches.
    allowed = plan.fastest(only)
    return Other(allowed) if allowed else Other(replace(plan, only=None).fastest(only), is_allowed=False)


def _is_better(plan: RankedCandidates, other: Other) -> bool:
    # By the formulas, as only the best plan was simulated.
    return other.candidate is not None and other.candidate.formula_seconds < plan.best.formula_seconds


def _cost(plan: RankedCandidates, other: Other) -> str:
    """Return `nothing fits`, or the cost of the best of the others, both by the closed formulas."""
    if other.candidate is None:
        return "nothing fits"
    apart = other.candidate.formula_seconds / plan.best.formula_seconds - 1
    not_asked = "" if other.is_allowed else ", outside of the request"
    direction = "less" if apart < 0 else "more"
    return f"a step takes {_percent(abs(apart))} {direction} ({other.candidate.name}){not_asked}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%" if abs(share) < 0.1 else f"{100 * share:.0f}%"
