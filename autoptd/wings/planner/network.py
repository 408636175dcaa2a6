"""Compute seconds of collectives and messages on a network of two levels: links in a node, cards between
nodes.

In: bytes, the size of a group, how many of its ranks share a node. Out: seconds. Numbers or numpy arrays
alike.

A ring over n ranks makes n - 1 steps, each moves an n-th of the buffer: what a rank sends
(`wire_bytes` in `ir/types.py`) goes through the slowest link of the ring, after so many hops. In a node that
link is a GPU's share of the fast links; over nodes it is what the cards of the group's ranks carry: the
node's other GPUs are in groups that do the same at that time. There are two protocols, one with short hops
and less bandwidth; and an all-reduce may go up and down a binary tree of nodes, whose hops take twice as
long. The fastest counts.

    Network(find_cluster("dgx-a100")).all_reduce(100e6, group=8, local=8)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from autoptd.ir.types import RING_PASSES, wire_bytes
from autoptd.wings.planner.cluster import Cluster

Number = Any


@dataclass(frozen=True)
class Network:
    """Times communication on `cluster`."""

    cluster: Cluster

    def all_gather(self, nbytes: Number, group: Number, local: Number) -> Number:
        """Return the seconds of an all-gather whose result is `nbytes`, or of such a reduce-scatter,
        over `group` ranks.
        """
        return self._ring("all-gather", nbytes, group, local)

    def all_to_all(self, nbytes: Number, group: Number, local: Number) -> Number:
        """Return the seconds of an all-to-all of a value of `nbytes` on all ranks together."""
        return self._ring("all-to-all", nbytes, group, local)

    def all_reduce(self, nbytes: Number, group: Number, local: Number) -> Number:
        """Return the seconds of an all-reduce of `nbytes` over `group` ranks, `local` of them in a node."""
        return np.minimum(self._ring("all-reduce", nbytes, group, local), self._tree(nbytes, group, local))

    def message(self, nbytes: Number, is_local: Number) -> Number:
        """Return the seconds of one message between two ranks, while the node's other GPUs send theirs."""
        fast, network = self.cluster.fast, self.cluster.network
        in_node = fast.message + nbytes / (fast.bandwidth * fast.fraction)
        return np.where(is_local, in_node, network.message + nbytes / self._cards(1))

    def bandwidth(self, local: Number, nodes: Number) -> Number:
        """Return the bytes/s through the slowest link of a ring that has `local` ranks in each of its
        nodes.
        """
        fast = self.cluster.fast.bandwidth * self.cluster.fast.fraction
        if not self.cluster.switched:
            # Each pair of GPUs has separate links: those to GPUs outside of the group are idle.
            others = np.maximum(np.asarray(local) - 1, 1)
            fast = fast * others / max(self.cluster.gpus_per_node - 1, 1)
        between = np.where(np.asarray(local) > 1, np.minimum(fast, self._cards(local)), self._cards(local))
        return np.where(nodes > 1, between, fast)

    def _cards(self, local: Number) -> Number:
        """Return the bytes/s of the cards that belong to `local` GPUs of a node."""
        cluster = self.cluster
        return (
            local
            * cluster.nics
            / cluster.gpus_per_node
            * cluster.network.bandwidth
            * cluster.network.fraction
        )

    def _ring(self, kind: str, nbytes: Number, group: Number, local: Number) -> Number:
        fast, network = self.cluster.fast, self.cluster.network
        passes = 1 if kind == "all-to-all" else RING_PASSES[kind]
        nodes = np.ceil(np.asarray(group) / local)
        # A ring's seconds: one hop per step, and the bytes that a rank sends through the slowest link.
        transfer = wire_bytes(kind, nbytes, group) / self.bandwidth(local, nodes)
        large = passes * _hops(group, nodes, fast.latency, network.latency) + transfer
        # The low-latency protocol: shorter hops, but only a fraction of the bandwidth.
        fraction = np.where(nodes > 1, network.small, fast.small)
        small = passes * _hops(group, nodes, fast.small_latency, network.small_latency) + transfer / fraction
        return np.where(np.asarray(group) > 1, np.minimum(large, small), 0.0)

    def _tree(self, nbytes: Number, group: Number, local: Number) -> Number:
        nodes = np.ceil(np.asarray(group) / local)
        depth = np.ceil(np.log2(np.maximum(nodes, 1)))
        # Up and down the tree, and each of its hops takes as long as two of a ring.
        hops = 4 * depth * self.cluster.network.latency
        return np.where(nodes > 1, hops + 2 * nbytes / self.bandwidth(local, nodes), np.inf)


def _hops(group: Number, nodes: Number, fast: float, network: float) -> Number:
    """Return the seconds of one pass of a ring over `nodes` nodes: one hop per node is between nodes."""
    # A ring enters each node once.
    between = np.where(nodes > 1, nodes, 0)
    return np.maximum(group - 1 - between, 0) * fast + between * network


__all__ = ["Network"]
