"""Compute the terms of a step's time: seconds of a layer, of the ends of the model, of a boundary, and once a step.

In: a shape, a cluster, a setting (one, or arrays of candidates). Out: `Terms`, with which `predict.py` simulates the
schedule and `estimate.py` evaluates its closed form. `Clock` times computation, `Network` communication; all of it
takes numbers or numpy arrays alike.

    Clock(find_cluster("dgx-a100")).product(1, 2048, 9600, 25600)
    Network(find_cluster("dgx-a100")).all_reduce(100e6, group=8, local=8)

A ring over n ranks moves 1/n of the buffer in each of n - 1 steps: the bytes that a rank sends
(`wire_bytes`) go through the slowest link of the ring. In a node that link is a GPU's share of the fast links; over
nodes it is what the cards of the group's ranks carry, as the node's other GPUs are in groups that do the same at that
time. Two protocols compete, one with short hops and less bandwidth; an all-reduce may also go up and down a
binary tree of nodes, whose hops take twice as long. The fastest counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autoptd.ir.types import RING_PASSES, wire_bytes
from autoptd.wings.planner.cluster import ELEMENT_BYTES, Cluster
from autoptd.wings.planner.counts import (
    CORE,
    Operator,
    Sizes,
    embedding_operators,
    end_parameters,
    exchanged_heads,
    head_operators,
    kv_width,
    layer_operators,
    layer_parameters,
    needed_again,
    vocab_rows,
)
from autoptd.wings.planner.setting import Setting
from autoptd.wings.planner.shape import Shape

Number = Any
# Bytes that the optimizer moves per parameter. 16-bit: the gradient is read, unscaled and written in 32 bits
# (6), checked (4), its norm taken (4), clipped (8); Adam reads gradient, weight, two moments and writes three
# (28); the weight is cast (6).
OPTIMIZER_BYTES = {2: 56, 4: 40}
# The share of a backward that weight gradients take.
WEIGHT_SHARE = 0.5
# A product of 16 bits is slower if a dim is not a multiple of this.
ALIGNED = 8


@dataclass(frozen=True)
class Passes:
    """Seconds of one microbatch on one rank: forward, backward, recomputation and exposed communication.

    `exposed_*`: over tp and cp, as far as no computation hides it; in backward including recomputation.
    `fetch_*`: of ZeRO-2 and 3.
    """

    forward: Number
    backward: Number
    again: Number = 0.0
    exposed_forward: Number = 0.0
    exposed_backward: Number = 0.0
    fetch_forward: Number = 0.0
    fetch_backward: Number = 0.0

    @property
    def whole_forward(self) -> Number:
        return self.forward + self.exposed_forward + self.fetch_forward

    @property
    def whole_backward(self) -> Number:
        return self.backward + self.again + self.exposed_backward + self.fetch_backward

    @property
    def whole(self) -> Number:
        return self.whole_forward + self.whole_backward


@dataclass(frozen=True)
class Terms:
    """Seconds of the parts of a step.

    For a microbatch on one rank: a `layer`, the `embedding`, the `head` with the loss; a message over a stage
    boundary, in a node (`link_local`) and between two (`link_remote`). Once a step: the `reduce` of gradients and the
    `optimizer`, both functions of the parameters on a rank, and the `tie` of embedding and head over the pipeline.
    """

    layer: Passes
    embedding: Passes
    head: Passes
    link_local: Number
    link_remote: Number
    reduce: Callable[[Number], Number]
    optimizer: Callable[[Number], Number]
    tie: Number


def count_terms(shape: Shape, cluster: Cluster, setting: Setting) -> Terms:
    """Compute the seconds of every term: numbers or arrays, like the degrees of the setting."""
    return _Counter(shape, cluster, setting).terms()


class _Counter:
    def __init__(self, shape: Shape, cluster: Cluster, setting: Setting) -> None:
        self.shape, self.cluster, self.setting = shape, cluster, setting
        self.clock, self.network = Clock(cluster, setting.precision), Network(cluster)
        self.e = self.clock.element_bytes
        is_split = setting.sequence_parallel
        self.sizes = Sizes(setting.microbatch, setting.t, setting.c, setting.t if is_split else 1, self.e)
        # The residual of a microbatch, not split over tp.
        self.value_bytes = self.e * setting.microbatch * shape.seq / setting.c * shape.hidden

    def terms(self) -> Terms:
        local, remote = self._links()
        embedding, head = end_parameters(self.shape, self.setting.t)
        return Terms(
            layer=self._layer(),
            embedding=self._end(
                embedding_operators(self.shape, self.sizes), (1, 0), embedding, is_read_again=False
            ),
            head=self._end(head_operators(self.shape, self.sizes), (0, 1), head, is_read_again=True),
            link_local=local,
            link_remote=remote,
            reduce=self._reduce,
            optimizer=self._optimizer,
            tie=self._tie(),
        )

    def _layer(self) -> Passes:
        operators = layer_operators(self.shape, self.sizes, self.cluster.software.attention)
        forward, backward = self.clock.forwards(operators), self.clock.backwards(operators)
        # Selective recomputation repeats the core of every layer; full recomputation a share of the layers from
        # their inputs, exchanges included.
        core = self.clock.forwards(operator for operator in operators if operator.part == CORE)
        redone = self.setting.full_share
        is_selective, is_all = self.setting.recompute == "selective", self.cluster.software.replays == "all"
        repeated = forward if is_all else self.clock.forwards(needed_again(operators))
        again = core if is_selective else redone * repeated
        overlap = self.cluster.software.dp_overlap
        tp_forward, tp_backward = self._exchanges(forward, backward)
        # The sum after the last product is not repeated: one of two calls, or of four with sequence
        # parallelism.
        needed = 0.75 if self.setting.sequence_parallel else 0.5
        exchanged = 1.0 if is_all else needed
        cp_forward, cp_backward = self._attend(operators)
        parameters = layer_parameters(self.shape, self.setting.t)
        fetch_forward, fetch_backward = self._fetch(parameters, self.cluster.software.fetches)
        return Passes(
            forward,
            backward,
            again,
            tp_forward + cp_forward,
            tp_backward + cp_backward + (tp_forward * exchanged + cp_forward) * redone,
            _exposed(fetch_forward, forward, overlap),
            _exposed(fetch_backward, backward, overlap),
        )

    def _end(
        self,
        operators: Sequence[Operator],
        exchanges: tuple[int, int],
        parameters: Number,
        is_read_again: bool,
    ) -> Passes:
        """Time an end of the model; `exchanges` are over tp, `is_read_again`: backward reads its parameters."""
        forward, backward = self.clock.forwards(operators), self.clock.backwards(operators)
        exchange, overlap = self._exchange(), self.cluster.software.dp_overlap
        fetch_forward, fetch_backward = self._fetch(parameters, 1, is_read_again)
        return Passes(
            forward,
            backward,
            0.0,
            exchanges[0] * exchange,
            exchanges[1] * exchange,
            _exposed(fetch_forward, forward, overlap),
            _exposed(fetch_backward, backward, overlap),
        )

    def _exchange(self) -> Number:
        """Time one summation of a residual over tp: an all-reduce, or a reduce-scatter and its all-gather."""
        setting = self.setting
        local = setting.local("tp", self.cluster.gpus_per_node)
        if setting.sequence_parallel:
            # A reduce-scatter takes as long as an all-gather of the same bytes.
            return 2 * self.network.all_gather(self.value_bytes, setting.t, local)
        return self.network.all_reduce(self.value_bytes, setting.t, local)

    def _exchanges(self, forward: Number, backward: Number) -> tuple[Number, Number]:
        """Time the exposed exchanges of a layer over tp, forward and backward: two each way.

        Those of backward overlap the wgrad GEMMs; with sequence parallelism only the reduce-scatter and the second
        gather of a product's input do, while the gather of the gradient is like one in forward.
        """
        software, both = self.cluster.software, 2 * self._exchange()
        one_way = _exposed(both, forward, software.tp_overlap)
        beside = max(software.tp_overlap, software.tp_overlap_backward)
        if self.setting.sequence_parallel:
            return one_way, one_way / 2 + _exposed(both, backward, beside)
        return one_way, _exposed(both, backward, beside)

    def _attend(self, operators: Sequence[Operator]) -> tuple[Number, Number]:
        """Time the exposed exchanges of attention over cp, forward and backward."""
        setting, shape, network = self.setting, self.shape, self.network
        local, tokens = setting.local("cp", self.cluster.gpus_per_node), setting.microbatch * shape.seq
        # The whole sequence: each rank has the keys and values of all others, or some heads of all tokens.
        queries = self.e * tokens * shape.query_width / setting.t
        keys = self.e * tokens * kv_width(shape, setting.t)
        if self.cluster.software.context == "ring":
            # Keys and values circulate during attention on the previous ones; gradients go with them.
            once = network.all_gather(2 * keys, setting.c, local)
            core = [operator for operator in operators if operator.part == CORE]
            forward, backward = self.clock.forwards(core), self.clock.backwards(core)
            return np.maximum(once - forward, 0.0), np.maximum(2 * once - backward, 0.0)
        # Queries, keys and values go there and results come back; gradients take the same way.
        heads = exchanged_heads(shape, setting.t, setting.c)
        copied = self.e * tokens * heads * shape.head_dim
        moved = 2 * sum(network.all_to_all(each, setting.c, local) for each in (queries, copied))
        gathered = 2 * network.all_gather(keys, setting.c, local)
        each_way = np.where(heads, moved, gathered)
        return each_way, each_way

    def _links(self) -> tuple[Number, Number]:
        """Time a boundary between stages of one node, and of two."""
        setting, software = self.setting, self.cluster.software
        # Each tensor rank sends 1/t over the boundary, and the receivers gather (SC'21, section 4.1).
        is_cut = setting.sequence_parallel or software.scatter
        nbytes = self.value_bytes / (setting.t if is_cut else 1)
        local = setting.local("tp", self.cluster.gpus_per_node)
        is_gathered = is_cut and not setting.sequence_parallel
        gather = self.network.all_gather(self.value_bytes, setting.t, local) if is_gathered else 0.0
        after = gather + software.exchange_seconds
        return self.network.message(nbytes, True) + after, self.network.message(nbytes, False) + after

    def _reduce(self, parameters: Number) -> Number:
        """Time the gradient sum over the replicas; with ZeRO a reduce-scatter, and the all-gather of parameters.

        Stages 2 and 3 sum gradients in every microbatch, and stage 3 fetches parameters too: see `_fetch`.
        """
        # Zeros in the shape of the argument, which may be an array.
        if self.setting.zero == 3:
            return 0.0 * parameters
        group, local = self._replicas()
        nbytes = parameters * self._gradient_bytes()
        if self.setting.zero:
            back = self.network.all_gather(parameters * self.e, group, local)
            return back if self.setting.zero == 2 else self.network.all_gather(nbytes, group, local) + back
        return self.network.all_reduce(nbytes, group, local)

    def _fetch(self, parameters: Number, count: int, is_read_again: bool = True) -> tuple[Number, Number]:
        """Time the traffic of ZeRO for one microbatch, forward and backward, in `count` collectives each: the gradients
        of these parameters, with stage 3 also the parameters for both directions.
        """
        zero = self.setting.zero
        if zero < 2:
            return 0.0, 0.0
        group, local = self._replicas()
        part = parameters / count
        gather = count * self.network.all_gather(part * self.e, group, local) if zero == 3 else 0.0
        gradients = count * self.network.all_gather(part * self._gradient_bytes(), group, local)
        return gather, gradients + (gather if is_read_again else 0.0)

    def _replicas(self) -> tuple[Number, Number]:
        """Return the number of ranks that hold the same parameters, and how many of them share a node."""
        setting, node = self.setting, self.cluster.gpus_per_node
        return setting.replicas, np.minimum(
            setting.local("dp", node) * setting.local("cp", node), setting.replicas
        )

    def _gradient_bytes(self) -> int:
        return self.cluster.software.gradient_bytes if self.e == 2 else 4

    def _optimizer(self, parameters: Number) -> Number:
        share = self.setting.replicas if self.setting.zero else 1
        return parameters * OPTIMIZER_BYTES[self.e] / self.clock.copy_rate / share

    def _tie(self) -> Number:
        """Time the sum of a tied embedding's two copies, between the first and the last pipeline rank."""
        setting = self.setting
        # In a zbv the first rank has both ends.
        if not self.shape.tied or setting.schedule_name == "zbv":
            return 0.0
        nbytes = vocab_rows(self.shape, setting.t) * self.shape.hidden * self._gradient_bytes()
        is_local = setting.p <= setting.local("pp", self.cluster.gpus_per_node)
        return np.where(np.asarray(setting.p) > 1, 2 * self.network.message(nbytes / 2, is_local), 0.0)


def _exposed(communication: Number, computation: Number, overlap: float) -> Number:
    """Return the exposed part of a communication, given a computation that hides a fraction `overlap` of it."""
    return communication - np.minimum(overlap * communication, computation)


@dataclass(frozen=True)
class Clock:
    """Times computation on a GPU of `cluster`."""

    cluster: Cluster
    precision: str = "bf16"

    @property
    def element_bytes(self) -> int:
        return ELEMENT_BYTES[self.precision]

    @property
    def copy_rate(self) -> float:
        """Bytes/s of large memory-bound kernels."""
        return self.cluster.gpu.memory_bandwidth * self.cluster.gpu.memory_fraction

    def moved(self, nbytes: Number) -> Number:
        """Return the seconds of a kernel that moves `nbytes`."""
        return nbytes / self.copy_rate + self.cluster.gpu.kernel_seconds

    def product(self, batch: Number, m: Number, n: Number, k: Number, extra: Number = 0) -> Number:
        """Return the seconds of `batch` products [m, k] x [k, n]: a roofline whose roof depends on the shape.

        `extra` bytes are moved in addition to the factors and the result.
        """
        gpu = self.cluster.gpu
        rate = gpu.flops(self.precision) * gpu.matrix_fraction
        # At k = ramp a product reaches half of its rate.
        work = 2 * batch * m * n * k * (1 + gpu.ramp / k)
        if gpu.units:
            # Tiles of the result run in waves on the GPU's units; on average the last wave is half empty.
            tiles = batch * np.maximum(m / gpu.tile, 1) * np.maximum(n / gpu.tile, 1)
            work = work * (1 + 0.5 * gpu.units / tiles)
        if self.element_bytes == 2:
            odd = np.mod(m, ALIGNED) + np.mod(n, ALIGNED) + np.mod(k, ALIGNED)
            fraction = np.where(np.asarray(batch) > 1, gpu.unaligned, gpu.unaligned_single)
            work = np.where(odd > 0, work / fraction, work)
        nbytes = self.element_bytes * batch * (m * k + k * n + m * n) + extra
        return np.maximum(work / rate, nbytes / self.copy_rate) + gpu.kernel_seconds

    def forward(self, operator: Operator) -> Number:
        """Return the seconds of an operator's forward."""
        if operator.fused is not None:
            return self._fused(operator.fused[0], operator.moved)
        return self.moved(operator.moved) if operator.product is None else self.product(*operator.product)

    def backward(self, operator: Operator) -> Number:
        """Return the seconds of an operator's backward; a product has two, and the weight's adds to its gradient."""
        if operator.fused is not None:
            return self._fused(operator.fused[1], operator.back)
        if operator.product is None:
            return self.moved(operator.back)
        batch, m, n, k = operator.product
        # The weight's gradient is read and written in float32 where the product would write 16 bits.
        extra = 6 * n * k if operator.has_weight else 0
        return self.product(batch, m, k, n) + self.product(batch, n, k, m, extra)

    def forwards(self, operators: Iterable[Operator]) -> Number:
        return sum(self.forward(operator) for operator in operators)

    def backwards(self, operators: Iterable[Operator]) -> Number:
        return sum(self.backward(operator) for operator in operators)

    def _fused(self, flops: Number, nbytes: Number) -> Number:
        software, gpu = self.cluster.software, self.cluster.gpu
        rate = gpu.flops(self.precision) * software.flash_fraction
        return np.maximum(software.causal * flops / rate, nbytes / self.copy_rate) + gpu.kernel_seconds


@dataclass(frozen=True)
class Network:
    """Times communication on `cluster`."""

    cluster: Cluster

    def all_gather(self, nbytes: Number, group: Number, local: Number) -> Number:
        """Return the seconds of an all-gather to `nbytes`, or a reduce-scatter of them, over `group` ranks."""
        return self._ring("all-gather", nbytes, group, local)

    def all_to_all(self, nbytes: Number, group: Number, local: Number) -> Number:
        """Return the seconds of an all-to-all of a value of `nbytes` on all ranks together."""
        return self._ring("all-to-all", nbytes, group, local)

    def all_reduce(self, nbytes: Number, group: Number, local: Number) -> Number:
        """Return the seconds of an all-reduce of `nbytes` over `group` ranks, `local` of them in a node."""
        return np.minimum(self._ring("all-reduce", nbytes, group, local), self._tree(nbytes, group, local))

    def message(self, nbytes: Number, is_local: Number) -> Number:
        """Return the seconds of one message between two ranks while the node's other GPUs send theirs."""
        fast, network = self.cluster.fast, self.cluster.network
        in_node = fast.message + nbytes / (fast.bandwidth * fast.fraction)
        return np.where(is_local, in_node, network.message + nbytes / self._cards(1))

    def bandwidth(self, local: Number, nodes: Number) -> Number:
        """Return the bytes/s through the slowest link of a ring with `local` ranks in each node."""
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
        share = local * cluster.nics / cluster.gpus_per_node
        return share * cluster.network.bandwidth * cluster.network.fraction

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
        # Up and down the tree, each of whose hops takes as long as two of a ring.
        hops = 4 * depth * self.cluster.network.latency
        return np.where(nodes > 1, hops + 2 * nbytes / self.bandwidth(local, nodes), np.inf)


def _hops(group: Number, nodes: Number, fast: float, network: float) -> Number:
    """Return the seconds of one pass of a ring over `nodes` nodes: one hop per node is between nodes."""
    # A ring enters each node once.
    between = np.where(nodes > 1, nodes, 0)
    return np.maximum(group - 1 - between, 0) * fast + between * network
