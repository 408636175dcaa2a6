"""Predict the step of any compiled program, from the counts and collectives of its traced, sharded graph.

In: a `Program` (of a model on meta tensors as well) and a cluster. Out: a `Prediction`. The speed of a product
depends on its sizes (`costs.products`; a program saved without them is timed as if all products were large). A
graph does not say which of its operators training systems fuse, so each reads and writes memory. Backward of an
operator that is not a product moves 1.5 times the bytes of its forward. docs/planner.md compares both predictions.

    program = autoptd.compile(model, t=8, p=4, d=2, example_inputs=batch)
    predict_program(program, "dgx-h100").breakdown
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from autoptd.ir.actions import ranks_of_stages
from autoptd.program.costs import ProductCosts
from autoptd.program.program import Program, check_program
from autoptd.program.specs import Collective
from autoptd.schedule.measure import Simulation
from autoptd.schedule.simulate import simulate
from autoptd.wings.planner.cluster import PRECISIONS, Cluster, Software, find_cluster
from autoptd.wings.planner.counts import add_overheads
from autoptd.wings.planner.predict import MIN_SECONDS, Prediction
from autoptd.wings.planner.setting import Setting
from autoptd.wings.planner.terms import OPTIMIZER_BYTES, Clock, Network, Passes

# Bytes that backward moves, relative to forward.
BACKWARD_MOVES = 1.5


def predict_program(
    program: Program, cluster: Cluster | str | Path, *, software: Software | str | None = None
) -> Prediction:
    """Predict a step of the compiled program, whose precision is that of most of its parameters' bytes.

    Memory is the ledger's (`Program.memory`): "parameters", "gradients" and "optimizer" (AdamW's moments and float32
    copies); "activations" at the peak of the simulated step; the allocator's slack and the context, as in `predict`.
    """
    check_program("autoptd.predict_program", program)
    cluster = find_cluster(cluster).with_software(software)
    found = _Reader(program, cluster)
    stages = [found.stage(index) for index in range(len(program.stages))]
    again = [found.again(index) for index in range(len(stages))]
    forward, backward, weight_gradient = [], [], []
    for stage, repeated in zip(stages, again, strict=True):
        forward.append(max(stage.whole_forward, MIN_SECONDS))
        backward.append(max(stage.whole_backward + repeated, MIN_SECONDS))
        weight_gradient.append(max(stage.backward / 2, MIN_SECONDS))
    run = simulate(
        program.orders, forward=forward, backward=backward, weight_gradient=weight_gradient, link=found.link
    )
    ranks, m = ranks_of_stages(program.orders), program.num_microbatches
    busiest = max(range(program.mesh.p), key=lambda rank: run.busy[rank])
    mine = [stage for stage, rank in zip(stages, ranks, strict=True) if rank == busiest]
    parts = {
        "compute": m * sum(stage.forward + stage.backward for stage in mine),
        "recompute": m * sum(again[index] for index, rank in enumerate(ranks) if rank == busiest),
        "tp_comm": m * sum(stage.exposed_forward + stage.exposed_backward for stage in mine),
        "pp_comm": 0.0,
        "bubble": run.makespan - run.busy[busiest],
        "dp_comm": max(found.once(rank) for rank in range(program.mesh.p)),
        "optimizer": max(found.optimizer(rank) for rank in range(program.mesh.p)),
    }
    breakdown = {name: float(seconds) * cluster.software.factor for name, seconds in parts.items()}
    seconds = sum(breakdown.values())
    kinds = _memory(program, run, cluster.software)
    memory = tuple(map(sum, zip(*kinds.values(), strict=True)))
    # Forward and backward of all microbatches and replicas.
    flops = program.model_flops / (program.mesh.size * seconds)
    repeated = sum(program.costs.again_flops_per_stage) / max(sum(program.costs.flops_per_stage), 1)
    return Prediction(
        seconds,
        breakdown,
        memory,
        kinds,
        flops,
        flops * (1 + repeated / 3),
        m,
        (),
        max(memory) <= cluster.gpu.memory_bytes,
    )


def _memory(program: Program, run: Simulation, software: Software) -> dict[str, tuple[float, ...]]:
    """Return bytes by kind, of the first rank of each pipeline rank, with padding, as the runtime holds them."""
    mesh = program.mesh
    states = [program.memory(mesh.at_stage(0, rank)) for rank in range(mesh.pipeline_ranks)]
    found = {
        "parameters": [float(state.parameters) for state in states],
        "gradients": [float(state.gradients) for state in states],
        "optimizer": [float(state.moments + state.masters) for state in states],
        "activations": list(run.memory(list(program.costs.cut.saved_bytes)).peaks),
    }
    return add_overheads(found, software)


class _Reader:
    """Times the records of a program."""

    def __init__(self, program: Program, cluster: Cluster) -> None:
        self.program, self.cluster, self.network = program, cluster, Network(cluster)
        self.clock = Clock(cluster, _precision(program))
        mesh = program.mesh
        self.setting = Setting(t=mesh.t, p=mesh.p, d=mesh.d)

    def stage(self, index: int) -> Passes:
        """Time a microbatch on one rank."""
        costs, gpu = self.program.costs, self.cluster.gpu
        moved = costs.moved_bytes_per_stage[index] / self.clock.copy_rate
        products, count = self.products(index)
        # The times of products include their launches.
        starts = (costs.kernels_per_stage[index] - count) * gpu.kernel_seconds
        # Messages over pp are links of the simulation.
        forward, backward = (0.0, 0.0)
        for call in self.program.collectives:
            if call.stage == index and call.scope == "microbatch" and call.axis != "pp":
                forward += self.call(call, call.forward)
                backward += self.call(call, call.backward)
        overlap = self.cluster.software.tp_overlap
        beside = max(overlap, self.cluster.software.tp_overlap_backward)
        return Passes(
            products[0] + moved + starts,
            products[1] + BACKWARD_MOVES * moved + 2 * starts,
            exposed_forward=(1 - overlap) * forward,
            exposed_backward=(1 - beside) * backward,
        )

    def again(self, index: int) -> float:
        """Time the recomputation in a microbatch's backward; its collectives are among those of backward."""
        costs = self.program.costs
        if not any(costs.again_kernels_per_stage[index : index + 1]):
            return 0.0
        products, count = self.products(index)
        share = costs.again_flops_per_stage[index] / max(costs.flops_per_stage[index], 1)
        moved = costs.again_moved_bytes_per_stage[index] / self.clock.copy_rate
        starts = costs.again_kernels_per_stage[index] - share * count
        return share * products[0] + moved + max(starts, 0.0) * self.cluster.gpu.kernel_seconds

    def products(self, index: int) -> tuple[tuple[float, float], int]:
        """Time the products of a stage, forward and backward, and count their kernels in forward."""
        costs, gpu = self.program.costs, self.cluster.gpu
        rows = [row for row in costs.products if row.stage == index]
        if not rows:
            # Saved by a version that did not list products.
            rate = gpu.flops(self.clock.precision) * gpu.matrix_fraction
            return (costs.flops_per_stage[index] / rate, costs.backward_flops_per_stage[index] / rate), 0
        forward, backward = 0.0, 0.0
        for row in rows:
            seconds = self.attention(row) if "attention" in row.kind else self.plain(row)
            forward += seconds[0]
            backward += seconds[1]
        return (forward, backward), sum(row.times for row in rows)

    def plain(self, row: ProductCosts) -> tuple[float, float]:
        """Time products of one size; backward has up to two, and the wgrad GEMM accumulates into the gradient."""
        batch, m, n, k = row.sizes
        work = 2 * batch * m * n * k
        once = float(self.clock.product(batch, m, n, k))
        extra = 6 * n * k if batch == 1 else 0
        # dL/dx = dL/dy w^T and dL/dw = x^T dL/dy, each with the sizes of the forward in another order.
        both = float(self.clock.product(batch, m, k, n)) + float(self.clock.product(batch, n, k, m, extra))
        return row.forward / work * once, row.backward / work / 2 * both

    def attention(self, row: ProductCosts) -> tuple[float, float]:
        """Time attention in one kernel."""
        software, gpu = self.cluster.software, self.cluster.gpu
        # The program counts attention in full; a causal kernel skips about half of it.
        share = software.causal if row.kind == "causal attention" else 1.0
        rate = gpu.flops(self.clock.precision) * software.flash_fraction / share
        start = row.times * gpu.kernel_seconds
        return row.forward / rate + start, row.backward / rate + start

    def call(self, call: Collective, kind: str) -> float:
        """Time one direction of a collective."""
        local = self._local(call)
        if kind == "all-reduce":
            return float(self.network.all_reduce(float(call.payload_bytes), call.group_size, local))
        if kind in ("all-gather", "reduce-scatter"):
            return float(self.network.all_gather(float(call.payload_bytes), call.group_size, local))
        # Each rank keeps one of its n parts: the traffic is that of an all-gather of 1/n.
        if kind == "all-to-all":
            return float(
                self.network.all_gather(call.payload_bytes / call.group_size, call.group_size, local)
            )
        return 0.0

    def once(self, rank: int) -> float:
        """Time the exposed communication of a pipeline rank once a step."""
        all_of_it = sum(self.call(call, kind) for call, kind in self._step_calls(rank))
        return all_of_it * (1 - self.cluster.software.dp_overlap)

    def optimizer(self, rank: int) -> float:
        ranks = ranks_of_stages(self.program.orders)
        trained = [spec for spec in self.program.params if spec.requires_grad and rank in spec.owners(ranks)]
        mesh = self.program.mesh
        nbytes = 0.0
        for spec in trained:
            # Each rank updates only the range that it stores.
            parts = math.prod(map(mesh.degree, spec.sharing_axes))
            nbytes += spec.local_bytes(mesh) / parts
        element = self.clock.element_bytes
        return nbytes / element * OPTIMIZER_BYTES[element] / self.clock.copy_rate

    def link(self, sender: int, receiver: int) -> float:
        """Time a message from stage to stage."""
        sent = 0
        for buffer in self.program.transfers:
            if (buffer.source, buffer.target) == (sender, receiver):
                sent += buffer.sent_bytes
        in_node: Any = self.setting.local("pp", self.cluster.gpus_per_node)
        ranks = ranks_of_stages(self.program.orders)
        is_local = ranks[sender] // in_node == ranks[receiver] // in_node
        return float(self.network.message(float(sent), is_local)) + self.cluster.software.exchange_seconds

    def _step_calls(self, rank: int) -> Iterator[tuple[Collective, str]]:
        for call in self.program.collectives:
            if call.scope != "microbatch" and rank in call.pp_ranks:
                yield call, call.forward
                yield call, call.backward

    def _local(self, call: Collective) -> int:
        node = self.cluster.gpus_per_node
        # The owners of a tied parameter are not an axis: assume that they are as close as possible.
        if call.axis in ("tp", "dp", "pp"):
            return int(np.minimum(self.setting.local(call.axis, node), call.group_size))
        return min(node, call.group_size)


def _precision(program: Program) -> str:
    """Return the precision of most bytes of the parameters."""
    bytes_of: dict[str, int] = {}
    for spec in program.params:
        name = PRECISIONS.get(spec.use.dtype.removeprefix("torch."), "fp32")
        bytes_of[name] = bytes_of.get(name, 0) + spec.local_bytes(program.mesh)
    return max(bytes_of, key=lambda name: (bytes_of[name], name))
