"""Estimate the step time and memory of many candidates at once in closed form, for a search.

In: a shape, a cluster, a `Setting` whose degrees are arrays. Out: an `Estimate` of arrays. It uses the same terms as
`predict`; only the pipeline is not simulated, but has a formula for its length, with stages that are equal except for
the ends of the model.

- 1F1B and GPipe: (m - 1) * (longest stage) + one microbatch through all stages and back. 1F1B has p of them in
  flight: if messages take time in addition to computation, each round of p may wait for the first one's round trip.
- interleaved, looped_bfs: m * (busiest rank) + (p - 1) * (a chunk and its messages, forward and back), and the waits
  from chunk to chunk if a group of microbatches is shorter than the way around the p ranks (`_laps`).
- zero bubble: zb_h1 idles (p - 1) * (F + B - W), zb_2p (p - 1) * (F + B - 2 W) (Qi et al. 2023, table 2), where F, B
  and W are a stage's; zbv does not idle, which is a lower bound: it waits in every microbatch if F, B and W differ.

    setting = Setting(t=np.array([8, 8]), p=np.array([12, 24]), d=np.array([4, 2]), batch=1536)
    estimate(shape, cluster, setting).step_seconds        # an array of two
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from autoptd.errors import InternalError
from autoptd.wings.planner.cluster import Cluster, Software, find_cluster
from autoptd.wings.planner.counts import (
    count_activations,
    end_parameters,
    fetched_bytes,
    layer_parameters,
    state_bytes,
    vocab_rows,
)
from autoptd.wings.planner.setting import Setting
from autoptd.wings.planner.shape import Shape, find_shape
from autoptd.wings.planner.terms import WEIGHT_SHARE, Terms, count_terms

Number = Any
# How many weight gradients each earlier rank computes instead of idling (Qi et al. 2023, table 2).
HIDDEN = {"zb_h1": 2, "zb_2p": 3}
# Schedules that `_bubble` and `_live` have formulas for.
WRITTEN = ("gpipe", "1f1b", "interleaved", "looped_bfs", "zb_h1", "zb_2p", "zbv")


@dataclass(frozen=True)
class Estimate:
    """Arrays with an entry per candidate: seconds, their parts as in `Prediction`, bytes of the fullest rank."""

    step_seconds: Number
    breakdown: dict[str, Number]
    memory_bytes: Number
    fits: Number


def estimate(
    shape: Shape | Mapping[str, Any],
    cluster: Cluster | str | Path,
    setting: Setting,
    software: Software | str | None = None,
) -> Estimate:
    """Estimate all candidates of `setting`, whose degrees must divide (`setting.checked` checks a single one)."""
    if setting.schedule_name not in WRITTEN:
        raise InternalError(
            f"schedule={setting.schedule_name!r}", "the planner has no formula for its length"
        )
    shape, cluster = find_shape(shape), find_cluster(cluster).with_software(software)
    terms = count_terms(shape, cluster, setting)
    parts = _seconds(shape, cluster, setting, terms)
    nbytes = fullest_bytes(shape, cluster, setting)
    seconds: Number = sum(parts.values())
    return Estimate(seconds, parts, nbytes, nbytes <= cluster.gpu.memory_bytes)


@dataclass(frozen=True)
class _Layers:
    """Layers of the first pipeline rank, of the busiest between, and of the last."""

    first: Number
    middle: Number
    last: Number


def _layers(shape: Shape, setting: Setting) -> _Layers:
    """Return the closed form of `split_layers`.

    Remaining layers go to stages 1, 2, ..., then 0, as the head takes longer than the embedding.
    """
    p = np.asarray(setting.p)
    stages = p * setting.v
    base, more = shape.layers // stages * setting.v, shape.layers % stages
    # Stage k is on rank k % p: of stages 1, 2, ... rank 0 has p, 2p, ..., and at the very end its stage 0.
    first = more // p + (more == stages - 1) * (more > 0)
    last = (np.minimum(more, stages - 2) + 1) // p
    return _Layers(base + first, base + np.ceil(more / p), base + last)


def _seconds(shape: Shape, cluster: Cluster, setting: Setting, terms: Terms) -> dict[str, Number]:
    p, v, m = np.asarray(setting.p), np.asarray(setting.v), setting.num_microbatches
    layers, layer, first, last = _layers(shape, setting), terms.layer, terms.embedding, terms.head
    overlap, in_node = cluster.software.pp_overlap, setting.local("pp", cluster.gpus_per_node)
    link = np.where(in_node >= p, terms.link_local, terms.link_remote)
    wait = (1 - overlap) * np.where(p > 1, link, 0.0)
    # With several chunks a value also goes from the last rank back to the first.
    hops = p - 1 + (v > 1)
    remote = np.ceil(p / in_node) - 1 + (v > 1) * (p > in_node)
    mean_link = (remote * terms.link_remote + (hops - remote) * terms.link_local) / np.maximum(hops, 1)

    front, middle = layers.first * layer.whole + first.whole, layers.middle * layer.whole
    back = layers.last * layer.whole + last.whole
    both, has_both = front + last.whole, _has_both_ends(setting)
    # The terms are those of the busiest rank: the first, the last or one between.
    busiest = np.where(has_both, np.maximum(both, middle), np.maximum(np.maximum(front, back), middle))
    has_last = np.where(has_both, busiest == both, busiest == back)
    has_first = np.where(has_both, busiest == both, (busiest == front) & ~has_last)
    count = np.where(has_last, layers.last, np.where(has_first, layers.first, layers.middle))

    def of_busiest(name: str) -> Number:
        ends = has_first * getattr(first, name), has_last * getattr(last, name)
        return (count * getattr(layer, name) + ends[0] + ends[1]) * m

    parts = {
        "compute": of_busiest("forward") + of_busiest("backward"),
        "recompute": of_busiest("again"),
        "tp_comm": of_busiest("exposed_forward") + of_busiest("exposed_backward"),
        "pp_comm": 2 * m * v * wait,
    }
    parts["bubble"] = _bubble(shape, setting, terms, busiest, wait, overlap * mean_link)
    parts |= _once(shape, cluster, setting, terms, busiest + 2 * v * wait)
    parts["dp_comm"] = parts["dp_comm"] + of_busiest("fetch_forward") + of_busiest("fetch_backward")
    return {name: seconds * cluster.software.factor for name, seconds in parts.items()}


def _bubble(
    shape: Shape, setting: Setting, terms: Terms, busiest: Number, wait: Number, link: Number
) -> Number:
    """Return the idle seconds of the busiest rank."""
    p, v, m = np.asarray(setting.p), np.asarray(setting.v), setting.num_microbatches
    name = setting.schedule_name
    # One microbatch through all stages and back.
    through = shape.layers * terms.layer.whole + terms.embedding.whole + terms.head.whole
    messages = (p - 1) * (2 * wait + 2 * link)
    idle_1f1b = through - busiest + messages
    chunk = shape.layers / (p * v) * terms.layer.whole
    idle_chunks = (p - 1) * chunk + messages + _laps(shape, setting, terms, wait, link)
    if name == "zbv":
        return np.where(p > 1, messages, 0.0)
    if name in HIDDEN:
        weights = HIDDEN[name] * WEIGHT_SHARE * shape.layers / p * terms.layer.backward
        return np.where(p > 1, np.maximum(idle_1f1b - messages - (p - 1) * weights, 0.0) + messages, 0.0)
    # All candidates share the name; those with one chunk run 1F1B.
    if name in ("1f1b", "interleaved"):
        around = through - p * busiest + 2 * (p - 1) * link
        # In a last, shorter round, microbatches go through fewer ranks.
        hop = 2 * link + shape.layers / p * terms.layer.whole - busiest
        rest = np.maximum((m - 1) % p - 1, 0) * np.maximum(hop, 0.0)
        idle_1f1b = idle_1f1b + (m - 1) // p * np.maximum(around, 0.0) + rest
    return np.where(p > 1, np.where(v > 1, idle_chunks, idle_1f1b), 0.0)


def _has_both_ends(setting: Setting) -> Number:
    """Tell whether the first pipeline rank has the head too: the only one, or the first of a zbv."""
    return (np.asarray(setting.p) == 1) | (setting.schedule_name == "zbv")


def _groups(setting: Setting) -> tuple[Number, Number]:
    """Return the microbatches of the first and last group that run through the chunks together (orders.py)."""
    p, m = np.asarray(setting.p), np.asarray(setting.num_microbatches)
    if setting.schedule_name == "looped_bfs":
        return m, m
    count = np.maximum(m // p, 1)
    return -(-m // count), m // count


def _laps(shape: Shape, setting: Setting, terms: Terms, wait: Number, link: Number) -> Number:
    """Return the seconds that a rank waits from chunk to chunk, for a group's first microbatch to pass p ranks.

    It waits in the first group's forwards and in the last one's backwards; the other groups overlap.
    """
    p, v = np.asarray(setting.p), np.asarray(setting.v)
    first, last = _groups(setting)
    layers = shape.layers / (p * v)
    forward = layers * terms.layer.whole_forward + wait
    backward = layers * terms.layer.whole_backward + wait
    late_forward = np.maximum(p * (forward + link) - first * forward, 0.0)
    late_backward = np.maximum(p * (backward + link) - last * backward, 0.0)
    late = late_forward + late_backward
    return (v - 1) * late


def _once(
    shape: Shape, cluster: Cluster, setting: Setting, terms: Terms, microbatch: Number
) -> dict[str, Number]:
    held = _parameters(shape, setting)
    parameters = np.maximum(
        held.first, np.where(np.asarray(setting.p) == 1, 0, np.maximum(held.last, held.middle))
    )
    reduce = terms.reduce(parameters)
    # Gradient sums may overlap the last microbatch; with chunks, the last group.
    window = microbatch * np.where(
        np.asarray(setting.v) > 1, np.minimum(setting.p, setting.num_microbatches), 1
    )
    hidden = np.minimum(cluster.software.dp_overlap * reduce, window)
    return {"dp_comm": reduce - hidden + terms.tie, "optimizer": terms.optimizer(parameters)}


def _parameters(shape: Shape, setting: Setting) -> _Layers:
    """Count the parameters of the same three ranks."""
    t, layers = setting.t, _layers(shape, setting)
    embedding, head = end_parameters(shape, t)
    layer = layer_parameters(shape, t)
    tied = vocab_rows(shape, t) * shape.hidden if shape.tied else 0
    # A rank with both ends holds a tied matrix once.
    both = _has_both_ends(setting)
    front, back = np.where(both, embedding + head - tied, embedding), np.where(both, 0.0, head)
    return _Layers(layers.first * layer + front, layers.middle * layer, layers.last * layer + back)


def fullest_bytes(shape: Shape, cluster: Cluster, setting: Setting) -> Number:
    """Return the bytes of the fullest rank: the first, with most in flight, the second, or the last, with logits."""
    state, kept = state_bytes(setting, cluster.software), count_activations(shape, cluster, setting)
    p, v = np.asarray(setting.p), np.asarray(setting.v)
    layers, held = _layers(shape, setting), _parameters(shape, setting)
    each = state.weight + state.gradient + state.optimizer
    moment, at_end = kept.once, np.maximum(kept.logits, kept.once)
    live = {name: _live(setting, rank) / v for name, rank in (("first", 0), ("middle", 1), ("last", p - 1))}
    first = (
        held.first * each
        + live["first"] * layers.first * kept.layer
        + np.ceil(live["first"]) * kept.embedding
    )
    middle = held.middle * each + live["middle"] * layers.middle * kept.layer + moment
    last = held.last * each + live["last"] * layers.last * kept.layer
    heads, is_v = np.ceil(live["last"]) * kept.head + at_end, setting.schedule_name == "zbv"
    alone = first + np.where(is_v, 1, np.ceil(live["first"])) * kept.head + at_end
    front = np.where(_has_both_ends(setting), alone, first + moment)
    others = np.maximum(np.where(p > 2, middle, 0.0), last + (moment if is_v else heads))
    tensors = np.where(p == 1, front, np.maximum(front, others))
    software = cluster.software
    return (tensors + fetched_bytes(shape, setting, software)) * (1 + software.slack) + software.context_bytes


def _live(setting: Setting, rank: Number) -> Number:
    """Return how many (chunk, microbatch) pairs a pipeline rank has in flight at most (orders.py)."""
    p, v, m = np.asarray(setting.p), np.asarray(setting.v), setting.num_microbatches
    plain = {
        "gpipe": m,
        "looped_bfs": m * v,
        "zb_2p": np.minimum(m, 2 * (p - rank) - 1),
        "zbv": np.minimum(2 * m, 2 * p),
    }
    if setting.schedule_name in plain:
        return plain[setting.schedule_name]
    chunks = np.minimum(m * v, (v - 1) * _groups(setting)[0] + 2 * (p - 1 - rank) + 1)
    return np.where(v > 1, chunks, np.minimum(m, p - rank))
