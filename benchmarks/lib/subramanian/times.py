"""S2: seconds of the operators, collectives and sends of Subramanian et al., as arrays over candidates.

In: work counted by `operators`, the machine, and how many ranks of each group share a fast domain. Out: seconds. The paper's
section 3.2: an operator takes the longer of its FLOPs and its bytes; a collective is a ring over the slow network, over the
fast one, or over both, where each domain has as many rings as it has ranks of the group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.lib.subramanian.operators import Array, Collective, Operator, Work
from benchmarks.lib.subramanian.system import Quirks, System

WHOLE = ("broadcast", "reduce")  # every byte passes every link; of the others (n-1)/n do


@dataclass(frozen=True)
class Group:
    """The ranks of an axis: `size` of them, `inside` of which share a fast domain."""

    size: Array
    inside: Array


@dataclass(frozen=True)
class LayerSeconds:
    """A layer and microbatch, forward or backward: `compute`, memory traffic that is longer than it, collectives."""

    compute: Array
    exposed_memory: Array
    communication: Array

    @property
    def total(self) -> Array:
        return self.compute + self.exposed_memory + self.communication


def collective_seconds(kind: str, size: Array, group: Group, system: System, quirks: Quirks) -> Array:
    """Seconds of a collective over `size` bytes."""
    n, inside = group.size, group.inside
    domains = n // inside
    sent = size if kind in WHOLE else size * (n - 1) / n
    slow = sent / (system.slow_bandwidth * quirks.network_efficiency)
    fast = sent / (system.fast_bandwidth * quirks.network_efficiency)
    both = np.maximum(slow / (system.nics_per_gpu * inside), fast)
    if kind == "all_reduce":
        both = 2 * both
        if not quirks.allreduce_once_in_a_network:
            slow, fast = 2 * slow, 2 * fast
    hops = system.slow_latency * (domains - 1) + system.fast_latency * (n - domains)
    seconds = np.where(
        inside == 1,
        slow + system.slow_latency * (n - 1),
        np.where(domains == 1, fast + system.fast_latency * (n - 1), both + hops),
    )
    return np.where((n > 1) & (size > 0), seconds, 0.0)


def layer_seconds(
    operators: Sequence[Operator],
    is_forward: bool,
    panels: Array,
    groups: Mapping[str, Group],
    system: System,
    quirks: Quirks,
) -> LayerSeconds:
    """Seconds of one direction of a layer; `groups` are those of the axes t1 and t2."""
    compute, exposed, communication = np.zeros_like(panels), np.zeros_like(panels), np.zeros_like(panels)
    for one in operators:
        work = one.forward if is_forward else one.backward
        busy = compute_seconds(one, work, system, quirks)
        waiting = np.maximum(work.moved / system.memory_bandwidth - busy, 0.0)
        compute = compute + busy
        exposed = exposed + waiting
        if one.is_paneled:
            step = _collectives_seconds(work.collectives, panels, groups, system, quirks)
            communication = communication + step + np.maximum(step * panels - (busy + waiting), 0.0)
        elif work.collectives:
            whole = np.ones_like(panels)
            communication = communication + _collectives_seconds(
                work.collectives, whole, groups, system, quirks
            )
    return LayerSeconds(compute, exposed, communication)


def compute_seconds(operator: Operator, work: Work, system: System, quirks: Quirks) -> Array:
    """Seconds of the FLOPs alone, with what an operator costs in any case."""
    peak = system.matrix_flops if operator.is_matrix else system.vector_flops
    return quirks.launch_seconds + work.flops / (peak * quirks.efficiency)


def _collectives_seconds(
    collectives: Sequence[Collective],
    parts: Array,
    groups: Mapping[str, Group],
    system: System,
    quirks: Quirks,
) -> Array:
    """One after the other, each of a `parts`-th of its bytes."""
    seconds = np.zeros_like(parts)
    for one in collectives:
        seconds = seconds + collective_seconds(one.kind, one.size / parts, groups[one.axis], system, quirks)
    return seconds


def overlapped_seconds(collective: Array, layer: Array, layers: Array) -> Array:
    """A collective per layer, all but one beside the compute of a layer (weights and their gradients over data ranks)."""
    return collective + np.maximum(collective - layer, 0.0) * (layers - 1)


def send_seconds(size: Array, p: Array, inside: Array, system: System, quirks: Quirks) -> Array:
    """Seconds of the send behind a stage, averaged over the p - 1 boundaries, `inside` ranks of a pipeline in a domain."""
    slow = system.slow_latency + size / (system.slow_bandwidth * quirks.network_efficiency)
    fast = system.fast_latency + size / (system.fast_bandwidth * quirks.network_efficiency)
    crossing = (p // inside - 1) / np.maximum(p - 1, 1)  # the share of boundaries that leave a domain
    mixed = (1 - crossing) * fast + (0.0 if quirks.free_crossing_p2p else crossing * slow)
    return np.where(p == 1, 0.0, np.where(inside > 1, mixed, slow))
