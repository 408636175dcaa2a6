"""Which strategy when: the same model on one GPU, on one node, on all GPUs, and on a slow network, as far as
`gpus` go.

In: the arguments of `plan`. Out: `Case`s, and text: the best plan of each case, and where its time goes
besides computation. No rules of thumb are used: each case is a separate search.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from autoptd.errors import PlanError
from autoptd.wings.planner.candidate import Candidate
from autoptd.wings.planner.cluster import Cluster, find_cluster
from autoptd.wings.planner.plan import plan
from autoptd.wings.planner.tables import MEANING

# How many times less bandwidth the slow network has between nodes.
SLOWDOWN = 10
# Terms in which a GPU works; in the others it waits.
WORK = ("compute", "recompute", "optimizer")


@dataclass(frozen=True)
class Case:
    """One case: its name, its GPUs, and the best plan, or why there is none."""

    name: str
    gpus: int
    best: Candidate | None
    fact: str = ""


def which_when(
    model_or_shape: Any, *, gpus: int, cluster: Any = "dgx-a100", batch: int, **constraints: Any
) -> list[Case]:
    """Plan the same model for one GPU, one node, `gpus` GPUs, and those with a network that is ten times
    slower.

    If `gpus` fit on a node, the cases are one GPU and `gpus`.
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
        # That a model does not fit on one GPU is an answer here.
        except PlanError as error:
            found.append(Case(name, count, None, error.fact))
    return found


def slowed(cluster: Cluster) -> Cluster:
    """Return the cluster with a tenth of the bandwidth between nodes."""
    return replace(cluster, network=replace(cluster.network, bandwidth=cluster.network.bandwidth / SLOWDOWN))


def cases_text(cases: Sequence[Case]) -> str:
    """Write one line a case, and what changes with the network."""
    lines = [f"{case.name}: {_case_text(case)}" for case in cases]
    # Four cases: one GPU, one node, all GPUs, all GPUs on the slow network.
    fast, slow = (cases[-2].best, cases[-1].best) if len(cases) == 4 else (None, None)
    if fast and slow:
        moved = [key for key in ("t", "p", "d", "v", "b") if fast.degrees[key] != slow.degrees[key]]
        changes = ", ".join(f"{key} {fast.degrees[key]} -> {slow.degrees[key]}" for key in moved)
        longer = 100 * (slow.seconds / fast.seconds - 1)
        lines.append(
            f"On the slow network a step takes {longer:.0f}% more; the plan: {changes or 'the same'}."
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
    return f"{text}; beside work most goes to {MEANING[most]}, {100 * waits[most] / best.seconds:.1f}%"


__all__ = ["Case", "cases_text", "slowed", "which_when"]
