"""A plan as text: the ranked table, and what became of the candidates that are not in it.

In: `RankedChoices`. Out: lines for a terminal. Seconds of a step, TFLOP/s per GPU, GB (1e9 bytes) of the fullest GPU, and how
the seconds divide in per cent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autoptd.planner.ranked import RankedChoices

# Of the terms.
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


def plan_table(plan: RankedChoices) -> str:
    """The choices, best first, and the counts of the rest."""
    terms = [name for name in NAMES if any(one.seconds_by.get(name) for one in plan.choices)]
    head = ["", "seconds", "TFLOP/s", "GB", *(NAMES[name] for name in terms), "plan"]
    rows = [head]
    for rank, one in enumerate(plan.choices, 1):
        shares = [f"{100 * one.seconds_by.get(name, 0.0) / one.seconds:.1f}%" for name in terms]
        rate, held = f"{one.flops_per_gpu / 1e12:.1f}", f"{one.bytes / 1e9:.1f}"
        seconds = f"{'' if one.is_simulated else '~'}{one.seconds:.4g}"
        rows.append([str(rank), seconds, rate, held, *shares, one.name + (" *" if one.not_yet else "")])
    widths = [max(len(row[column]) for row in rows) for column in range(len(head) - 1)]
    lines = ["  ".join([*map(str.rjust, row, widths), row[-1]]).rstrip() for row in rows]
    if any(not one.is_simulated for one in plan.choices):
        lines.append("~ by the closed formulas, its schedule not simulated")
    missing = dict.fromkeys(name for one in plan.choices for name in one.not_yet)
    if missing:
        lines.append(f"* needs what the runtime does not have yet, plan.json leaves it out: {', '.join(missing)}")
    return "\n".join([*lines, "", *count_lines(plan)])


def settings_text(settings: Mapping[str, Any]) -> str:
    """`recompute=full, zero=1`."""
    return ", ".join(f"{name}={value}" for name, value in settings.items())


def memory_text(held: Mapping[str, float]) -> str:
    """`weights 7.9 GB, optimizer 2.9 GB`, the largest first."""
    parts = sorted(held.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {value / 1e9:.1f} GB" for name, value in parts if value)


def count_lines(plan: RankedChoices) -> list[str]:
    """How many cells there were, and why those that are out are out."""
    found = plan.found
    lines = [
        f"{found.cells:,} combinations of degrees, microbatch and switches, {found.fitting:,} of them candidates that fit; "
        f"{found.evaluated:,} candidates timed, {found.bounded:,} combinations set aside by a bound",
    ]
    return lines + [
        f"{count:9,d}  {reason}" for reason, count in sorted(found.rejected.items(), key=lambda one: -one[1])
    ]


__all__ = ["MEANING", "NAMES", "count_lines", "memory_text", "plan_table", "settings_text"]
