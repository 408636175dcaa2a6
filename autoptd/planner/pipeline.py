"""The pipeline: the schedule run on paper with the seconds of every stage.

In: the terms of a step's time, layers per stage. Out: a `Run`: seconds by kind, and the most that each rank keeps.

A schedule of very many microbatches is run with fewer, twice: between its warm-up and its end every microbatch more takes the
same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

from autoptd.ir.actions import ranks_of_stages
from autoptd.options import ZERO_BUBBLE
from autoptd.planner.cluster import Cluster
from autoptd.planner.setting import Setting
from autoptd.planner.terms import Passes, Terms
from autoptd.schedule import Simulation, build_orders, simulate

# Simulated at once: some 0.05 s.
MOST_ACTIONS = 20_000
# Seconds: the simulation wants positive ones.
LEAST = 1e-12
# Of a backward, where the schedule has weight gradients apart.
WEIGHT_SHARE = 0.5


@dataclass(frozen=True)
class Run:
    """`breakdown` in seconds, which add up to the pipeline's; `microbatch`: seconds of one on the busiest rank; `ranks`: the
    pipeline rank of every stage."""

    breakdown: dict[str, float]
    microbatch: float
    simulation: Simulation
    live_factor: float
    ranks: tuple[int, ...]

    def peaks(self, per_stage: Sequence[float]) -> tuple[float, ...]:
        """Bytes that each rank keeps at its fullest moment, for bytes of one microbatch per stage."""
        return tuple(self.live_factor * one for one in self.simulation.memory(list(per_stage)).peaks)


def run_pipeline(
    terms: Terms, layers: Sequence[int], setting: Setting, cluster: Cluster, most_actions: int = MOST_ACTIONS
) -> Run:
    """Simulate the schedule with these stages; where it has more than `most_actions`, with fewer microbatches."""
    p, m, name = setting.p, setting.num_microbatches, setting.schedule_name
    stages = [_stage(terms, count, at, len(layers)) for at, count in enumerate(layers)]
    ranks = ranks_of_stages(build_orders(name, p, setting.v, 1))
    links = _links(terms, ranks, setting, cluster)
    overlap = cluster.software.pp_overlap
    exposed = [(1 - overlap) * _waits(links, at, len(layers)) for at in range(len(layers))]
    forward = [max(one.whole_forward + wait, LEAST) for one, wait in zip(stages, exposed, strict=True)]
    backward = [max(one.whole_backward + wait, LEAST) for one, wait in zip(stages, exposed, strict=True)]

    def run(count: int) -> Simulation:
        return simulate(
            build_orders(name, p, setting.v, count),
            forward=forward,
            backward=backward,
            weight_gradient=[WEIGHT_SHARE * one.backward for one in stages],
            link=lambda sender, receiver: overlap * links[min(sender, receiver)],
        )

    is_regular = name not in ZERO_BUBBLE and m % p == 0 and (setting.v == 1 or len(set(layers)) == 1)
    few = _fewer(p, m, max(most_actions // (2 * len(layers)), (2 if is_regular else 4) * p))
    simulation = run(few)
    finish = simulation.finish
    if few < m:
        slope = (finish - run(few - p).finish) / p
        finish += slope * (m - few)
    busy = [0.0] * p
    for stage, rank in enumerate(ranks):
        busy[rank] += forward[stage] + backward[stage]
    busiest = busy.index(max(busy))
    mine = [stage for stage, rank in enumerate(ranks) if rank == busiest]
    breakdown = {
        "compute": m * sum(stages[at].forward + stages[at].backward for at in mine),
        "recompute": m * sum(stages[at].again for at in mine),
        "tp_comm": m * sum(stages[at].exposed_forward + stages[at].exposed_backward for at in mine),
        "pp_comm": m * sum(2 * exposed[at] for at in mine),
        "dp_comm": m * sum(stages[at].fetch_forward + stages[at].fetch_backward for at in mine),
    }
    breakdown["bubble"] = max(finish - sum(breakdown.values()), 0.0)
    is_all_live = name in ("gpipe", "looped_bfs")
    return Run(breakdown, busy[busiest], simulation, m / few if is_all_live else 1.0, ranks)


def _fewer(p: int, m: int, most: int) -> int:
    """Microbatches to simulate: all, or at most `most`, congruent to m modulo p."""
    return m if m <= most else m - p * -(-(m - most) // p)


def _stage(terms: Terms, layers: int, at: int, stages: int) -> Passes:
    """Seconds of a stage: its layers, and the ends of the model that it has."""
    parts: list[tuple[int, Passes]] = [(layers, terms.layer)]
    if at == 0:
        parts.append((1, terms.embedding))
    if at == stages - 1:
        parts.append((1, terms.head))

    def total(name: str) -> float:
        return float(sum(times * getattr(part, name) for times, part in parts))

    return Passes(*(total(field.name) for field in fields(Passes)))


def _links(terms: Terms, ranks: Sequence[int], setting: Setting, cluster: Cluster) -> list[float]:
    """Seconds from each stage to the next: on one rank (zbv's turn) none, else in a node, or to the next one."""
    in_node: Any = setting.local("pp", cluster.gpus_per_node)
    return [
        0.0 if a == b else float(terms.link_local if a // in_node == b // in_node else terms.link_remote)
        for a, b in pairwise(ranks)
    ]


def _waits(links: Sequence[float], at: int, stages: int) -> float:
    """Seconds that a stage is held up by one message each way, where messages do not run beside computation."""
    return max([*links[max(at - 1, 0) : at], *links[at : at + 1]], default=0.0) if stages > 1 else 0.0


__all__ = ["Run", "run_pipeline"]
