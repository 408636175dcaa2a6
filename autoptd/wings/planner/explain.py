"""Explain in words why a plan is the best; all numbers are from the same model, most from a separate search.

In: `RankedCandidates`. Out: text: the choice; the term that decides against the runner-up, and its distance;
which of the three takeaways of Narayanan et al. (SC'21, section 3) holds here, each with the best plan that
does not follow it, within the request or, if nothing in it fits, among all degrees; and features that the
runtime does not have yet.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from autoptd.wings.planner.candidate import Candidate
from autoptd.wings.planner.ranked import RankedCandidates
from autoptd.wings.planner.search import Columns, Filter
from autoptd.wings.planner.tables import MEANING, memory_text, settings_text


@dataclass(frozen=True)
class Other:
    """The best plan of another kind, None where none fits.

    `is_allowed`: it meets the constraints of the request.
    """

    candidate: Candidate | None
    is_allowed: bool = True


def explain_plan(plan: RankedCandidates) -> str:
    """Explain a plan's best candidate."""
    lines = [*_chosen(plan), *_against_the_next(plan), *takeaways(plan)]
    # This comes last, as it qualifies the rest: the plan cannot be run unchanged.
    if plan.best.not_yet:
        lines.append(
            f"The runtime does not have yet, and plan.json leaves out: {settings_text(plan.best.not_yet)}."
        )
    return "\n".join(lines)


def _chosen(plan: RankedCandidates) -> list[str]:
    best = plan.best
    # Terms of 0 (no recomputation, no pipeline) are left out below.
    largest = sorted(best.seconds_by.items(), key=lambda item: -item[1])
    shares = ", ".join(
        f"{MEANING[name]} {_percent(value / best.seconds)}" for name, value in largest if value
    )
    filled = _percent(best.bytes / plan.capacity_bytes)
    return [
        f"Chosen: {best.name}: {best.seconds:.4g} s a step, {best.flops_per_gpu / 1e12:.1f} TFLOP/s per GPU.",
        f"Its time: {shares}.",
        f"Its fullest GPU holds {best.bytes / 1e9:.1f} GB, {filled} of what there is: {memory_text(best.bytes_by)}.",
    ]


def _against_the_next(plan: RankedCandidates) -> list[str]:
    """Say what decides between the best and the runner-up, and whether that is more than the model can
    tell apart.
    """
    if len(plan.candidates) < 2:
        return ["No other plan fits."]
    best, other, error = plan.best, plan.candidates[1], plan.model.uncertainty
    gap = other.seconds / best.seconds - 1
    lines = [f"Next: {other.name}: {other.seconds:.4g} s, {_percent(gap)} more.{_decided(best, other)}"]
    if math.isinf(error):
        unknown = "How far two predictions may be off each other is not known: for this cluster, software and precision"
        return [
            *lines,
            f"{unknown} none was compared with a measurement; measure the first few if it matters.",
        ]
    # Within the error of two predictions the order of two plans is not known.
    limit = best.seconds * (1 + error)
    close = [candidate for candidate in plan.candidates[1:] if candidate.seconds <= limit]
    if close:
        last = close[-1].seconds / best.seconds - 1
        lines.append(
            f"Two predictions were up to {_percent(error)} off each other where they were measured: {len(close)} more "
            f"of the {len(plan.candidates)} listed are within that (up to {_percent(last)}); measure them if it matters."
        )
    else:
        lines.append(
            f"Two predictions were up to {_percent(error)} off each other where they were measured, which is less than "
            "the distance to the next."
        )
    return lines


def _decided(best: Candidate, other: Candidate) -> str:
    """Name the terms in which the other is worst, and best."""
    apart = differences(best, other)
    worst = max(apart, key=lambda name: apart[name])
    gain = min(apart, key=lambda name: apart[name])
    # The other is nowhere worse: it ties, and was listed second for its columns.
    if apart[worst] <= 0:
        return ""
    text = f" What decides is {MEANING[worst]}: {apart[worst]:.3g} s more"
    if apart[gain] < 0:
        text += f", against {-apart[gain]:.3g} s less for {MEANING[gain]}"
    return f"{text}."


def differences(best: Candidate, other: Candidate) -> dict[str, float]:
    """Return the seconds by which the other is longer, term by term."""
    names = dict.fromkeys([*best.seconds_by, *other.seconds_by])
    return {name: other.seconds_by.get(name, 0.0) - best.seconds_by.get(name, 0.0) for name in names}


def takeaways(plan: RankedCandidates) -> list[str]:
    """Check SC'21's three takeaways, each against the best plan that goes another way."""
    if plan.gpus == 1:
        return ["On one GPU there is nothing to divide: the microbatch is what is left to choose."]
    return [_tensor_within_a_node(plan), _model_parallel_to_fit(plan), _microbatch(plan)]


def _tensor_within_a_node(plan: RankedCandidates) -> str:
    """Check takeaway 1: tensor parallelism up to the GPUs of a node, pipelines across nodes."""
    node, t = plan.node, plan.best.degrees["t"]
    rule = f"SC'21's takeaway 1 (tensor parallelism within a node of {node}, pipelines across)"
    if plan.gpus <= node:
        return f"{rule} says nothing here: all GPUs share a node."
    if t <= node:
        other = _best(plan, lambda configs: _degree(plan, configs, "t") > node)
        # A constraint, not the model, may have kept t small: then a plan beyond it is faster.
        holds = "holds for what was asked" if _is_better(plan, other) else "holds"
        return f"{rule} {holds}: t={t}. With t over {node} {_cost(plan, other)}."
    other = _best(plan, lambda configs: _degree(plan, configs, "t") <= node)
    return f"{rule} does not hold: t={t} spans nodes. With t up to {node} {_cost(plan, other)}."


def _model_parallel_to_fit(plan: RankedCandidates) -> str:
    """Check takeaway 2: as much model parallelism as the memory asks for, data parallelism for the rest."""
    size = plan.best.degrees["t"] * plan.best.degrees["p"]

    def ranks(configs: Columns) -> np.ndarray:
        return _degree(plan, configs, "t") * _degree(plan, configs, "p")

    # Each asks the same search again with a filter; configurations are arrays, so a filter is one comparison.
    fewer = _best(plan, lambda configs: ranks(configs) < size)
    more = _best(plan, lambda configs: ranks(configs) > size)
    rule = "SC'21's takeaway 2 (t*p just large enough for memory, data parallelism beyond)"
    if fewer.candidate is None:
        return f"{rule} holds: t*p={size} is the least that fits. With more {_cost(plan, more)}."
    holds = "does not hold" if fewer.is_allowed else "is not what was asked"
    less = f": less than t*p={size} fits. With less {_cost(plan, fewer)}."
    return f"{rule} {holds}{less} With more {_cost(plan, more)}."


def _microbatch(plan: RankedCandidates) -> str:
    """Check takeaway 3: the best microbatch depends on the model, the pipeline and the batch."""
    b = plan.best.degrees["b"]
    larger = _best(plan, lambda configs: _degree(plan, configs, "b") > b)
    less = ""
    if b > 1:
        smaller = _best(plan, lambda configs: _degree(plan, configs, "b") < b)
        less = f" With a smaller one {_cost(plan, smaller)}."
    rule = "SC'21's takeaway 3 (the microbatch is a compromise)"
    return f"{rule}: b={b} here.{less} With a larger one {_cost(plan, larger)}."


def _best(plan: RankedCandidates, only: Filter) -> Other:
    """Find the best among what `only` wants: within the constraints or, where nothing of that fits, among
    all degrees.
    """
    # `replace` drops the filter of the request, not its switches.
    allowed = plan.fastest(only)
    return Other(allowed) if allowed else Other(replace(plan, only=None).fastest(only), is_allowed=False)


def _is_better(plan: RankedCandidates, other: Other) -> bool:
    # Formula against formula: the best plan was simulated, the other one was not.
    return other.candidate is not None and other.candidate.formula_seconds < plan.best.formula_seconds


def _cost(plan: RankedCandidates, other: Other) -> str:
    """Return `nothing fits`, or what the best of the others would cost, both by the closed formulas."""
    if other.candidate is None:
        return "nothing fits"
    apart = other.candidate.formula_seconds / plan.best.formula_seconds - 1
    not_asked = "" if other.is_allowed else ", which was not asked for"
    direction = "less" if apart < 0 else "more"
    return f"a step takes {_percent(abs(apart))} {direction} ({other.candidate.name}){not_asked}"


def _degree(plan: RankedCandidates, configs: Columns, name: str) -> np.ndarray:
    return plan.model.degrees(configs)[name]


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%" if abs(share) < 0.1 else f"{100 * share:.0f}%"


__all__ = ["differences", "explain_plan", "takeaways"]
