"""Predict the time of a training step, and the memory of each pipeline rank, for one way to run it.

In: a shape, a cluster, the degrees. Out: a `Prediction`. The schedule is simulated, with uneven stages: the
embedding on the first, the head and the loss on the last, and layers that do not divide.

    found = predict({"layers": 96, "hidden": 12288, "heads": 96, "seq": 2048}, "dgx-a100", t=8, p=12, d=4, batch=1536,
                    recompute="full")
    found.step_seconds, found.flops_per_gpu, max(found.memory)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

from autoptd.errors import PlanError
from autoptd.ir.actions import ZERO_BUBBLE, ranks_of_stages
from autoptd.schedule.measure import Simulation
from autoptd.schedule.orders import build_orders
from autoptd.schedule.simulate import simulate
from autoptd.wings.planner.cluster import Cluster, Software, find_cluster
from autoptd.wings.planner.counts import (
    add_overheads,
    count_activations,
    fetched_bytes,
    model_flops,
    split_layers,
    stage_parameters,
    state_bytes,
    vocab_rows,
)
from autoptd.wings.planner.setting import Setting, checked
from autoptd.wings.planner.shape import Shape, shape_of
from autoptd.wings.planner.terms import WEIGHT_SHARE, Passes, Terms, count_terms

# The most actions that are simulated at once, which takes some 0.05 s.
MAX_ACTIONS = 20_000
# The simulation needs positive times.
MIN_SECONDS = 1e-12


@dataclass(frozen=True)
class Prediction:
    """The cost of one step of the whole batch.

    `breakdown` has the parts of `step_seconds`, on the busiest pipeline rank: "compute", "recompute", "tp_comm" and
    "pp_comm" (exposed communication), its "bubble", "dp_comm" (gradients, parameters of ZeRO, tied embeddings) and
    "optimizer". `memory`: peak bytes per GPU of each pipeline rank, with its parts in `memory_breakdown`.
    `flops_per_gpu`: model FLOP/s per GPU (no recomputation, attention in full); `hardware_flops_per_gpu` includes
    recomputation (SC'21's equation 3 for full). `fits`: whether every rank's memory is enough. `layers`: per stage.
    """

    step_seconds: float
    breakdown: dict[str, float]
    memory: tuple[float, ...]
    memory_breakdown: dict[str, tuple[float, ...]]
    flops_per_gpu: float
    hardware_flops_per_gpu: float
    num_microbatches: int
    layers: tuple[int, ...]
    fits: bool


def predict(
    shape_or_model: Any,
    cluster: Cluster | str | Path,
    *,
    t: int = 1,
    p: int = 1,
    d: int = 1,
    c: int = 1,
    v: int = 1,
    microbatch: int = 1,
    batch: int,
    schedule: str | None = None,
    recompute: str = "none",
    sequence_parallel: bool = False,
    zero: int = 0,
    precision: str = "bf16",
    placement: Mapping[str, int] | None = None,
    software: Software | str | None = None,
    max_actions: int = MAX_ACTIONS,
) -> Prediction:
    """Predict one step of `batch` sequences, by the formulas of docs/planner.md.

    Sizes are in sequences, times in seconds.

    `shape_or_model`: a `Shape`, a mapping with its fields, or a model with a `config`; `cluster`: a name of
    autoptd/machines, a path, or a `Cluster`. `schedule`: one of `ir.actions.SCHEDULES` (default 1f1b, or interleaved
    if v > 1). `recompute`: "none", "selective", "full", or a mix ("full:1/2": half of each stage's layers).
    `placement`: how many ranks of "tp", "cp", "dp", "pp" share a node; by default ranks are numbered tp fastest, then
    cp, dp, pp. `software`: a generation of software.toml instead of the cluster's. `max_actions`: how many actions of a
    long schedule are simulated before it is extrapolated. PlanError for an invalid request.
    """
    shape, cluster = shape_of(shape_or_model), find_cluster(cluster).with_software(software)
    request = Setting(
        t, p, d, c, v, microbatch, batch, schedule, recompute, sequence_parallel, zero, precision, placement
    )
    setting = checked(request, shape, cluster.gpus_per_node)
    if precision == "bf16" and not cluster.gpu.bf16:
        fact = f"the GPUs of {cluster.name} have no such products"
        raise PlanError("precision='bf16'", fact, "precision='fp16'")
    terms = count_terms(shape, cluster, setting)
    # Layers are assigned to stages by their time.
    ends = float(terms.embedding.whole), float(terms.head.whole)
    layers = split_layers(shape.layers, setting.p * setting.v, *ends, float(terms.layer.whole))
    run = run_pipeline(terms, layers, setting, cluster, max_actions)
    breakdown = _breakdown(shape, cluster, setting, terms, layers, run)
    memory = _memory(shape, cluster, setting, layers, run)
    seconds = sum(breakdown.values())
    totals = tuple(map(sum, zip(*memory.values(), strict=True)))
    # FLOPs of the whole batch over this are FLOP/s of one GPU.
    per_gpu = seconds * setting.gpus
    return Prediction(
        seconds,
        breakdown,
        totals,
        memory,
        float(model_flops(shape, batch)) / per_gpu,
        float(model_flops(shape, batch, recompute, replays_all=cluster.software.replays == "all")) / per_gpu,
        setting.num_microbatches,
        tuple(layers),
        max(totals) <= cluster.gpu.memory_bytes,
    )


def _breakdown(
    shape: Shape, cluster: Cluster, setting: Setting, terms: Terms, layers: list[int], run: Run
) -> dict[str, float]:
    parameters = _parameters(shape, setting, layers, run)
    # The rank with the most parameters decides, as all ranks meet at the end of a step.
    reduce = max(float(terms.reduce(count)) for count in parameters)
    # Sums may overlap the backwards of the last microbatch, or with chunks of the last group.
    window = run.microbatch * (min(setting.p, setting.num_microbatches) if setting.v > 1 else 1)
    hidden = min(cluster.software.dp_overlap * reduce, window)
    found = {
        **run.breakdown,
        "dp_comm": run.breakdown["dp_comm"] + reduce - hidden + float(terms.tie),
        "optimizer": max(float(terms.optimizer(count)) for count in parameters),
    }
    return {name: seconds * cluster.software.factor for name, seconds in found.items()}


def _memory(
    shape: Shape, cluster: Cluster, setting: Setting, layers: list[int], run: Run
) -> dict[str, tuple[float, ...]]:
    """Return bytes by kind, for all pipeline ranks."""
    p, state = setting.p, state_bytes(setting, cluster.software)
    kept = count_activations(shape, cluster, setting)
    parameters = _parameters(shape, setting, layers, run)
    per_stage = [count * float(kept.layer) for count in layers]
    # The ends of the model, with their own activations of each microbatch in flight.
    per_stage[0] += float(kept.embedding)
    per_stage[-1] += float(kept.head)
    activations = run.peaks(per_stage)
    fetched = float(fetched_bytes(shape, setting, cluster.software))
    moment = [float(kept.once) + fetched] * p
    last = run.ranks[-1]
    # On the rank of the loss, the logits are gone before the backward of a layer runs.
    moment[last] = max(moment[last], float(kept.logits) + fetched)
    found = {
        "parameters": [count * float(state.weight) for count in parameters],
        "gradients": [count * float(state.gradient) for count in parameters],
        "optimizer": [count * float(state.optimizer) for count in parameters],
        "activations": list(activations),
        "buffers": moment,
    }
    return add_overheads(found, cluster.software)


def _parameters(shape: Shape, setting: Setting, layers: list[int], run: Run) -> list[float]:
    """Count the parameters of each pipeline rank; one with both ends of the model has a tied matrix once."""
    found = [0.0] * setting.p
    for rank, count in zip(run.ranks, stage_parameters(shape, layers, setting.t), strict=True):
        found[rank] += count
    if shape.tied and len(layers) > 1 and run.ranks[0] == run.ranks[-1]:
        found[run.ranks[0]] -= vocab_rows(shape, setting.t) * shape.hidden
    return found


@dataclass(frozen=True)
class Run:
    """A simulated pipeline.

    `breakdown`: parts of the pipeline's seconds; `microbatch`: seconds of one on the busiest rank; `ranks`: the
    pipeline rank of every stage. `live_factor`: in-flight microbatches of the real schedule over the simulated one's.
    """

    breakdown: dict[str, float]
    microbatch: float
    simulation: Simulation
    live_factor: float
    ranks: tuple[int, ...]

    def peaks(self, per_stage: Sequence[float]) -> tuple[float, ...]:
        """Return the peak bytes of each rank, given the bytes of one microbatch per stage."""
        return tuple(self.live_factor * peak for peak in self.simulation.memory(list(per_stage)).peaks)


def run_pipeline(
    terms: Terms, layers: Sequence[int], setting: Setting, cluster: Cluster, max_actions: int = MAX_ACTIONS
) -> Run:
    """Simulate the schedule with the layers of each stage.

    A schedule with more than `max_actions` is simulated twice with fewer microbatches, and extrapolated: between
    warm-up and end, every further microbatch takes the same time.
    """
    p, m, name = setting.p, setting.num_microbatches, setting.schedule_name
    stages = [_stage(terms, count, at, len(layers)) for at, count in enumerate(layers)]
    ranks = ranks_of_stages(build_orders(name, p, setting.v, 1))
    links = _links(terms, ranks, setting, cluster)
    overlap = cluster.software.pp_overlap
    # The part of a message that overlaps computation is the link's delay; the rest is time of the stage.
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

    # A regular schedule repeats itself every p microbatches after its warm-up.
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
    # The rest is idle time of the busiest rank.
    breakdown["bubble"] = max(makespan - sum(breakdown.values()), 0.0)
    # These two hold all microbatches before the first backward; others depend on the length of the pipeline.
    is_all_live = name in ("gpipe", "looped_bfs")
    return Run(breakdown, busy[busiest], simulation, m / few if is_all_live else 1.0, ranks)


def _seconds_of(stages: Sequence[Passes], exposed: Sequence[float], m: int) -> dict[str, float]:
    """Sum the seconds of a rank's stages in `m` microbatches, by kind; `exposed`: messages per stage, one way."""
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
    """Sum the seconds of a stage: its layers and ends of the model."""
    parts: list[tuple[int, Passes]] = [(layers, terms.layer)]
    if at == 0:
        parts.append((1, terms.embedding))
    if at == stages - 1:
        parts.append((1, terms.head))

    def total(name: str) -> float:
        return float(sum(times * getattr(part, name) for times, part in parts))

    return Passes(*(total(field.name) for field in fields(Passes)))


def _links(terms: Terms, ranks: Sequence[int], setting: Setting, cluster: Cluster) -> list[float]:
    """Return the seconds of a message from each stage to the next; 0 on one rank, where a zbv turns."""
    in_node: Any = setting.local("pp", cluster.gpus_per_node)

    def seconds(sender: int, receiver: int) -> float:
        if sender == receiver:
            return 0.0
        is_local = sender // in_node == receiver // in_node
        return float(terms.link_local if is_local else terms.link_remote)

    return [seconds(sender, receiver) for sender, receiver in pairwise(ranks)]


def _waits(links: Sequence[float], at: int, stages: int) -> float:
    """Return the seconds that a stage waits for one message each way if messages do not overlap computation."""
    if stages == 1:
        return 0.0
    return max(links[max(at - 1, 0) : at + 1], default=0.0)
