"""Predict the time of a training step, and the memory of each pipeline rank, for one way to run it.

In: a shape, a cluster, the degrees. Out: a `Prediction`. The schedule itself is simulated, with uneven
stages: the embedding on the first, the head and the loss on the last, layers that do not divide.

    found = predict({"layers": 96, "hidden": 12288, "heads": 96, "seq": 2048}, "dgx-a100", t=8, p=12, d=4, batch=1536,
                    recompute="full")
    found.step_seconds, found.flops_per_gpu, max(found.memory)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autoptd.errors import PlanError
from autoptd.wings.planner.cluster import Cluster, Software, find_cluster
from autoptd.wings.planner.counts import model_flops
from autoptd.wings.planner.layout import split_layers, stage_parameters, vocab_rows
from autoptd.wings.planner.memory import add_overheads, count_activations, fetched_bytes, state_bytes
from autoptd.wings.planner.model_shape import shape_of
from autoptd.wings.planner.pipeline import MAX_ACTIONS, Run, run_pipeline
from autoptd.wings.planner.setting import Setting, checked
from autoptd.wings.planner.shape import Shape
from autoptd.wings.planner.terms import Terms, count_terms


@dataclass(frozen=True)
class Prediction:
    """The cost of one step.

    `step_seconds` for one step of the whole batch; `breakdown`: its parts, in seconds, which add up to it: on
    the busiest pipeline rank "compute", "recompute", "tp_comm" and "pp_comm" (what no computation hides),
    then its "bubble", "dp_comm" (gradients, parameters of ZeRO, tied embeddings), "optimizer". `memory`:
    bytes that a GPU of each pipeline rank holds at its peak; `memory_breakdown`: its parts, per pipeline
    rank. `flops_per_gpu`: model FLOP/s per GPU (nothing recomputed, attention in full);
    `hardware_flops_per_gpu` includes recomputation (SC'21's equation 3 for full). `fits`: whether
    every rank holds no more than the GPU has. `layers`: of each stage.
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

    `shape_or_model`: a `Shape`, a mapping with its fields, or a model with a `config` that tells them;
    `cluster`: a name of autoptd/machines, a path, a `Cluster`. `schedule`: one of `ir.actions.SCHEDULES` (1f1b,
    or interleaved where v > 1). `recompute`: "none", "selective", "full", or a mix ("full:1/2": half of each
    stage's layers). `placement`: how many ranks of "tp", "cp", "dp", "pp" share a node; by default ranks are
    numbered tp fastest, then cp, dp, pp. `software`: a generation of software.toml instead of the cluster's
    own. `max_actions`: how much of a long schedule is simulated before the rest is taken to go on alike.
    PlanError where the request makes no sense.
    """
    shape, cluster = shape_of(shape_or_model), find_cluster(cluster).with_software(software)
    request = Setting(
        t, p, d, c, v, microbatch, batch, schedule, recompute, sequence_parallel, zero, precision, placement
    )
    setting = checked(request, shape, cluster.gpus_per_node)
    if precision == "bf16" and not cluster.gpu.bf16:
        raise PlanError(
            "precision='bf16'", f"the GPUs of {cluster.name} have no such products", "precision='fp16'"
        )
    terms = count_terms(shape, cluster, setting)
    # Layers are dealt to stages by time, so the seconds of a layer come first.
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
    # All ranks meet at the end of a step: the one with the most parameters decides.
    reduce = max(float(terms.reduce(count)) for count in parameters)
    # Sums may overlap the last backwards: those of one microbatch, or with chunks of a group of p.
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
    """Return bytes by kind, each for all pipeline ranks."""
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
    # On the rank of the loss the logits are there before any layer's backward runs: not both at once.
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
    """Count the parameters of each pipeline rank.

    A rank that has both ends of the model has a tied matrix once.
    """
    found = [0.0] * setting.p
    # With v > 1 a rank has several stages.
    for rank, count in zip(run.ranks, stage_parameters(shape, layers, setting.t), strict=True):
        found[rank] += count
    if shape.tied and len(layers) > 1 and run.ranks[0] == run.ranks[-1]:
        found[run.ranks[0]] -= vocab_rows(shape, setting.t) * shape.hidden
    return found


__all__ = ["Prediction", "predict"]
