"""Simulate the pipeline: the schedule with the seconds of every stage.

In: the terms of a step's time, layers per stage. Out: a `Run`: seconds by kind, and the peak of the
activations that each rank saves.

A schedule with very many microbatches is simulated twice with fewer: between warm-up and end, every further
microbatch takes the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

from autoptd.ir.actions import ZERO_BUBBLE, ranks_of_stages
from autoptd.schedule import Simulation, build_orders, simulate
from autoptd.wings.planner.cluster import Cluster
from autoptd.wings.planner.setting import Setting
from autoptd.wings.planner.terms import Passes, Terms

# More than these are not simulated at once; it takes some 0.05 s.
MAX_ACTIONS = 20_000
# The simulation wants times above 0.
MIN_SECONDS = 1e-12
# The share of a backward that weight gradients take, where the schedule runs them apart.
WEIGHT_SHARE = 0.5


@dataclass(frozen=True)
class Run:
    """A simulated pipeline.

    `breakdown` in seconds, which add up to the pipeline's; `microbatch`: seconds of one on the busiest rank;
    `ranks`: the pipeline rank of every stage. `live_factor`: in-flight microbatches of the real schedule over
    those of the simulated one.
    """

    breakdown: dict[str, float]
    microbatch: float
    simulation: Simulation
    live_factor: float
    ranks: tuple[int, ...]

    def peaks(self, per_stage: Sequence[float]) -> tuple[float, ...]:
        """Return the bytes that each rank keeps at its fullest moment, for bytes of one microbatch
        per stage.
        """
        return tuple(self.live_factor * peak for peak in self.simulation.memory(list(per_stage)).peaks)


def run_pipeline(
    terms: Terms, layers: Sequence[int], setting: Setting, cluster: Cluster, max_actions: int = MAX_ACTIONS
) -> Run:
    """Simulate the schedule with these stages.

    Where it has more than `max_actions`, with fewer microbatches.
    """
    p, m, name = setting.p, setting.num_microbatches, setting.schedule_name
    stages = [_stage(terms, count, at, len(layers)) for at, count in enumerate(layers)]
    ranks = ranks_of_stages(build_orders(name, p, setting.v, 1))
    links = _links(terms, ranks, setting, cluster)
    overlap = cluster.software.pp_overlap
    # What a message takes beside computation is the link's delay; the rest holds the stage up, so it counts
    # as its time.
    exposed, forward, backward = [], [], []
    for at, stage in enumerate(stages):
        wait = (1 - overlap) * _waits(links, at, len(layers))
        exposed.append(wait)
        forward.append(max(stage.whole_forward + wait, MIN_SECONDS))
        backward.append(max(stage.whole_backward + wait, MIN_SECONDS))

    def run(count: int) -> Simulation:
        return simulate(
            build_orders(name, p, setting.v, count),
            forward=forward,
            backward=backward,
            weight_gradient=[WEIGHT_SHARE * stage.backward for stage in stages],
            link=lambda sender, receiver: overlap * links[min(sender, receiver)],
        )

    # A regular schedule repeats itself every p microbatches once it is warm: the rest goes on with the same
    # slope.
    is_regular = name not in ZERO_BUBBLE and m % p == 0 and (setting.v == 1 or len(set(layers)) == 1)
    few = _fewer(p, m, max(max_actions // (2 * len(layers)), (2 if is_regular else 4) * p))
    simulation = run(few)
    makespan = simulation.makespan
    if few < m:
        slope = (makespan - run(few - p).makespan) / p
        makespan += slope * (m - few)
    busy = [0.0] * p
    for at, rank in enumerate(ranks):
        busy[rank] += forward[at] + backward[at]
    busiest = busy.index(max(busy))
    mine = [at for at, rank in enumerate(ranks) if rank == busiest]
    breakdown = _seconds_of([stages[at] for at in mine], [exposed[at] for at in mine], m)
    # The remainder of the total is the busiest rank's idle time.
    breakdown["bubble"] = max(makespan - sum(breakdown.values()), 0.0)
    # These two hold all microbatches before the first backward; others as many as the pipeline is long.
    is_all_live = name in ("gpipe", "looped_bfs")
    return Run(breakdown, busy[busiest], simulation, m / few if is_all_live else 1.0, ranks)


def _seconds_of(stages: Sequence[Passes], exposed: Sequence[float], m: int) -> dict[str, float]:
    """Sum the seconds by kind of a rank's stages in `m` microbatches; `exposed`: messages of each stage, one
    way.
    """
    return {
        "compute": m * sum(stage.forward + stage.backward for stage in stages),
        "recompute": m * sum(stage.again for stage in stages),
        "tp_comm": m * sum(stage.exposed_forward + stage.exposed_backward for stage in stages),
        "pp_comm": m * sum(2 * seconds for seconds in exposed),
        "dp_comm": m * sum(stage.fetch_forward + stage.fetch_backward for stage in stages),
    }


def _fewer(p: int, m: int, most: int) -> int:
    """Return the microbatches to simulate: all, or at most `most`, congruent to m modulo p."""
    return m if m <= most else m - p * -(-(m - most) // p)


def _stage(terms: Terms, layers: int, at: int, stages: int) -> Passes:
    """Sum the seconds of a stage: its layers, and the ends of the model that it has."""
    parts: list[tuple[int, Passes]] = [(layers, terms.layer)]
    if at == 0:
        parts.append((1, terms.embedding))
    if at == stages - 1:
        parts.append((1, terms.head))

    def total(name: str) -> float:
        return float(sum(times * getattr(part, name) for times, part in parts))

    return Passes(*(total(field.name) for field in fields(Passes)))


def _links(terms: Terms, ranks: Sequence[int], setting: Setting, cluster: Cluster) -> list[float]:
    """Return the seconds from each stage to the next: none on one rank (zbv's turn), else in a node, or
    to the next one.
    """
    in_node: Any = setting.local("pp", cluster.gpus_per_node)

    def seconds(sender: int, receiver: int) -> float:
        if sender == receiver:
            return 0.0
        is_local = sender // in_node == receiver // in_node
        return float(terms.link_local if is_local else terms.link_remote)

    return [seconds(sender, receiver) for sender, receiver in pairwise(ranks)]


def _waits(links: Sequence[float], at: int, stages: int) -> float:
    """Return the seconds that a stage is held up by one message each way, where messages do not run
    beside computation.
    """
    if stages == 1:
        return 0.0
    before, behind = links[max(at - 1, 0) : at], links[at : at + 1]
    return max([*before, *behind], default=0.0)


__all__ = ["Run", "run_pipeline"]
