"""Compute the terms of a step's time: seconds of a layer, of both ends of the model, of a boundary, and once
per step.

In: a shape, a cluster, a setting (one, or arrays of candidates). Out: `Terms`, with which `predict.py`
simulates the schedule and `estimate.py` evaluates its closed form. Both agree because they use the same
terms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autoptd.wings.planner.cluster import Cluster
from autoptd.wings.planner.counts import (
    CORE,
    Operator,
    Sizes,
    embedding_operators,
    exchanged_heads,
    head_operators,
    kv_width,
    layer_operators,
    needed_again,
)
from autoptd.wings.planner.layout import end_parameters, layer_parameters, vocab_rows
from autoptd.wings.planner.network import Network
from autoptd.wings.planner.setting import Setting
from autoptd.wings.planner.shape import Shape
from autoptd.wings.planner.time import Clock

Number = Any
# Bytes that the optimizer moves per parameter. 16-bit: the gradient is read, unscaled and written in 32 bits
# (6), checked (4), its norm taken (4), clipped (8); Adam reads gradient, weight, two moments and writes three
# (28); the weight is cast (6).
OPTIMIZER_BYTES = {2: 56, 4: 40}


@dataclass(frozen=True)
class Passes:
    """Seconds of one microbatch on one rank: forward, backward, recomputation and exposed communication.

    `exposed`: over tp and cp, as far as no computation hides it; that of backward includes recomputation.
    `fetch`: that of ZeRO-2 and 3.
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
    """Seconds of everything a step consists of.

    One microbatch on one rank: a `layer`, the `embedding`, the `head` with its loss. A message over a stage
    boundary, in a node and between two, with what follows it. Once a step: the gradients' `reduce` and the
    `optimizer`, both functions of the parameters on a rank, and the `tie` of embedding and head over the
    pipeline.
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
    """Compute the seconds of every term, numbers or arrays as the setting's degrees are."""
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
        # Selective recomputation repeats the core of every layer; full, whole layers, of a share of them.
        core = self.clock.forwards(operator for operator in operators if operator.part == CORE)
        # The share of layers that backward computes again from their inputs, exchanges included.
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
        """Time an end of the model.

        `exchanges`: over tp, forward and backward; `is_read_again`: backward reads its parameters.
        """
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
        """Time a layer's exchanges over tp that are not hidden, forward and backward: two each way.

        Those of backward overlap the wgrad GEMMs. With sequence parallelism that holds for the reduce-scatter
        and for the second gather of a product's input, while the gather of the gradient is like one in
        forward.
        """
        software, both = self.cluster.software, 2 * self._exchange()
        one_way = _exposed(both, forward, software.tp_overlap)
        beside = max(software.tp_overlap, software.tp_overlap_backward)
        if self.setting.sequence_parallel:
            return one_way, one_way / 2 + _exposed(both, backward, beside)
        return one_way, _exposed(both, backward, beside)

    def _attend(self, operators: Sequence[Operator]) -> tuple[Number, Number]:
        """Time what attention of ranks with other tokens exchanges, forward and backward, as far as nothing
        hides it.
        """
        setting, shape, network = self.setting, self.shape, self.network
        local, tokens = setting.local("cp", self.cluster.gpus_per_node), setting.microbatch * shape.seq
        # Of the whole sequence: each rank has the keys and values of all others, or all tokens' heads.
        queries = self.e * tokens * shape.query_width / setting.t
        keys = self.e * tokens * kv_width(shape, setting.t)
        if self.cluster.software.context == "ring":
            # Keys and values circulate during attention on the previous ones; gradients go with them.
            once = network.all_gather(2 * keys, setting.c, local)
            core = [operator for operator in operators if operator.part == CORE]
            forward, backward = self.clock.forwards(core), self.clock.backwards(core)
            return np.maximum(once - forward, 0.0), np.maximum(2 * once - backward, 0.0)
        # Queries, keys, values there and results back, and the same of their gradients.
        heads = exchanged_heads(shape, setting.t, setting.c)
        copied = self.e * tokens * heads * shape.head_dim
        moved = 2 * sum(network.all_to_all(each, setting.c, local) for each in (queries, copied))
        gathered = 2 * network.all_gather(keys, setting.c, local)
        each_way = np.where(heads, moved, gathered)
        return each_way, each_way

    def _links(self) -> tuple[Number, Number]:
        """Time a boundary between stages of one node, and of two."""
        setting, software = self.setting, self.cluster.software
        # Each tensor rank sends 1/t over the boundary (SC'21, section 4.1: scatter/gather); the receiver
        # gathers.
        is_cut = setting.sequence_parallel or software.scatter
        nbytes = self.value_bytes / (setting.t if is_cut else 1)
        local = setting.local("tp", self.cluster.gpus_per_node)
        is_gathered = is_cut and not setting.sequence_parallel
        gather = self.network.all_gather(self.value_bytes, setting.t, local) if is_gathered else 0.0
        after = gather + software.exchange_seconds
        return self.network.message(nbytes, True) + after, self.network.message(nbytes, False) + after

    def _reduce(self, parameters: Number) -> Number:
        """Time the gradients' sum over the replicas.

        With ZeRO, their reduce-scatter and the parameters' way back.

        Stage 2 keeps a part of the gradients only, so it sums them in every microbatch, and stage 3 fetches
        parameters too: `_fetch`.
        """
        # 0 in the shape of the argument, which may be an array.
        if self.setting.zero == 3:
            return 0.0 * parameters
        group, local = self._replicas()
        nbytes = parameters * self._gradient_bytes()
        if self.setting.zero:
            back = self.network.all_gather(parameters * self.e, group, local)
            return back if self.setting.zero == 2 else self.network.all_gather(nbytes, group, local) + back
        return self.network.all_reduce(nbytes, group, local)

    def _fetch(self, parameters: Number, count: int, is_read_again: bool = True) -> tuple[Number, Number]:
        """Time what ZeRO moves for one microbatch, forward and backward, in `count` collectives each.

        Stage 2 the gradients of these parameters; stage 3 the parameters for both directions as well.
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
        """Return the ranks that hold the same parameters, and how many of them share a node."""
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


__all__ = ["Passes", "Terms", "count_terms"]
