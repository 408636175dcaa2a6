"""A plan as text: the ranked table, and what became of the candidates that are not in it.

In: `RankedCandidates`. Out: lines for a terminal. Seconds of a step, TFLOP/s per GPU, GB (1e9 bytes) of the
fullest GPU, and how the seconds divide in per cent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autoptd.wings.planner.candidate import Candidate
from autoptd.wings.planner.memory import recipe_text
from autoptd.wings.planner.ranked import RankedCandidates
from autoptd.wings.words import aligned

# Term -> its column.
NAMES = {
    "compute": "compute",
    "recompute": "recompute",
    "exposed_memory": "memory",
    "tp_comm": "tensor",
    "pp_comm": "pipeline",
    "bubble": "bubble",
    "dp_comm": "data",
    "optimizer": "optimizer",
}
MEANING = {
    "compute": "computation",
    "recompute": "computing activations again",
    "exposed_memory": "memory traffic that no computation hides",
    "tp_comm": "communication of tensor ranks",
    "pp_comm": "messages between pipeline stages",
    "bubble": "the pipeline bubble",
    "dp_comm": "communication of data ranks",
    "optimizer": "the optimizer",
}


def plan_table(plan: RankedCandidates) -> str:
    """Tabulate the candidates, best first, and the counts of the rest."""
    used: set[str] = set()
    for candidate in plan.candidates:
        used |= {name for name, seconds in candidate.seconds_by.items() if seconds}
    # No column for a term that is 0 in all candidates, such as recomputation where none was asked for.
    terms = [name for name in NAMES if name in used]
    head = ["", "seconds", "TFLOP/s", "GB", *(NAMES[name] for name in terms), "plan"]
    rows = [head, *(_row(rank, candidate, terms) for rank, candidate in enumerate(plan.candidates, 1))]
    # Numbers are right-aligned; the last column is the plan in words.
    lines = aligned(rows, right=range(len(head) - 1))
    if any(not candidate.is_simulated for candidate in plan.candidates):
        lines.append("~ by the closed formulas, its schedule not simulated")
    missing: dict[str, None] = {}
    for candidate in plan.candidates:
        missing |= dict.fromkeys(candidate.not_yet)
    if missing:
        lines.append(
            f"* needs what the runtime does not have yet, plan.json leaves it out: {', '.join(missing)}"
        )
    return "\n".join([_basis(plan), *lines, "", *count_lines(plan)])


def _basis(plan: RankedCandidates) -> str:
    """Say for what recipe and machine the numbers hold."""
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
    """Say how many configurations there were, and why the rejected ones were."""
    found = plan.found
    lines = [
        f"{found.configs:,} combinations of degrees, microbatch and switches, {found.fitting:,} of them candidates that fit; "
        f"{found.evaluated:,} candidates timed, {found.bounded:,} combinations set aside by a bound",
    ]
    for reason, count in sorted(found.rejected.items(), key=lambda item: -item[1]):
        lines.append(f"{count:9,d}  {reason}")
    return lines


__all__ = ["MEANING", "NAMES", "count_lines", "memory_text", "plan_table", "settings_text"]
