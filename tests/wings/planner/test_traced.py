"""A compiled program's prediction beside that of its shape: the same model, counted twice."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import autoptd
from autoptd.wings.planner.cluster import Cluster, find_cluster
from autoptd.wings.planner.counts import Sizes, embedding_operators, head_operators, layer_operators
from autoptd.wings.planner.predict import predict
from autoptd.wings.planner.shape import Shape
from autoptd.wings.planner.traced import predict_program
from examples.gpt import GPT, GPTConfig

SHAPE = Shape(layers=4, hidden=1024, heads=16, seq=512, vocab=8192, dropout=False)
ROWS = 16
KINDS = ("parameters", "gradients", "optimizer", "activations")
APART = 0.02  # of docs/planner.md


def program_of(mesh: dict[str, Any]) -> autoptd.Program:
    with torch.device("meta"):
        model = GPT(GPTConfig(SHAPE.vocab, SHAPE.seq, SHAPE.layers, SHAPE.heads, SHAPE.hidden))
    ids = torch.zeros(ROWS, SHAPE.seq, dtype=torch.long, device="meta")
    return autoptd.compile(model, example_inputs=(ids, ids), num_microbatches=4, plan={"cut": [2, 2]}, **mesh)


def ideal() -> Cluster:
    """A cluster whose products run at one rate, whatever their shape: a program knows no single product's
    sizes.
    """
    cluster = find_cluster("dgx-a100").with_software("autoptd")
    gpu = dataclasses.replace(cluster.gpu, units=0, ramp=0.0, kernel_seconds=0.0)
    whole = dataclasses.replace(
        cluster.software, causal=1.0, flash_fraction=gpu.matrix_fraction, scatter=False
    )
    return dataclasses.replace(cluster, gpu=gpu, software=whole)


def test_a_program_and_its_shape_predict_alike() -> None:
    program = program_of({"t": 2, "p": 2, "d": 2})
    traced = predict_program(program, ideal())
    shape = predict(SHAPE, ideal(), t=2, p=2, d=2, batch=ROWS, microbatch=2, precision="fp32")
    assert traced.step_seconds == pytest.approx(sum(traced.breakdown.values()))
    assert traced.step_seconds == pytest.approx(shape.step_seconds, rel=0.06)
    assert traced.breakdown["compute"] == pytest.approx(shape.breakdown["compute"], rel=0.06)
    assert traced.breakdown["tp_comm"] == pytest.approx(shape.breakdown["tp_comm"], rel=0.05)
    assert traced.flops_per_gpu == pytest.approx(shape.flops_per_gpu, rel=0.06)
    assert traced.num_microbatches == 4 and len(traced.memory) == 2 and traced.fits


def test_what_is_computed_again_takes_its_time() -> None:
    program = program_of({"t": 2, "p": 2, "d": 2, "recompute": "full"})
    whole = predict_program(program_of({"t": 2, "p": 2, "d": 2}), ideal())
    traced = predict_program(program, ideal())
    asked = {"t": 2, "p": 2, "d": 2, "batch": ROWS, "microbatch": 2, "precision": "fp32"}
    shape = predict(SHAPE, ideal(), recompute="full", **asked)  # type: ignore[arg-type]
    assert traced.breakdown["recompute"] == pytest.approx(shape.breakdown["recompute"], rel=0.1)
    assert traced.breakdown["compute"] == whole.breakdown["compute"] and not whole.breakdown["recompute"]
    assert traced.step_seconds > whole.step_seconds
    assert (
        traced.hardware_flops_per_gpu
        > traced.flops_per_gpu
        == pytest.approx(whole.flops_per_gpu * whole.step_seconds / traced.step_seconds)
    )


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_on_a_real_cluster_too(sequence_parallel: bool) -> None:
    """Products are as fast as their sizes let them, memory has what `predict` adds: as far apart as
    docs/planner.md says.
    """
    program = program_of({"t": 2, "p": 2, "d": 2, "sequence_parallel": sequence_parallel})
    traced = predict_program(program, "dgx-a100", software="autoptd")
    shape = predict(
        SHAPE,
        "dgx-a100",
        t=2,
        p=2,
        d=2,
        batch=ROWS,
        microbatch=2,
        precision="fp32",
        software="autoptd",
        sequence_parallel=sequence_parallel,
    )
    assert traced.step_seconds == pytest.approx(shape.step_seconds, rel=APART)
    assert traced.breakdown["compute"] == pytest.approx(shape.breakdown["compute"], rel=APART)
    assert max(traced.memory) == pytest.approx(max(shape.memory), rel=0.05)
    kinds = traced.memory_breakdown
    states = [program.memory(program.mesh.at_stage(0, rank)) for rank in range(2)]
    assert kinds["parameters"] == tuple(state.parameters for state in states)
    assert kinds["gradients"] == tuple(state.gradients for state in states)
    assert kinds["optimizer"] == tuple(state.moments + state.masters for state in states)
    held = [sum(kinds[name][rank] for name in KINDS) for rank in range(2)]
    assert held == pytest.approx(program.costs.cut.rank_bytes, rel=1e-6)
    assert kinds["context"] == shape.memory_breakdown["context"]
    assert kinds["slack"] == pytest.approx([0.1 * nbytes for nbytes in held])
    little = dataclasses.replace(
        find_cluster("dgx-a100"), gpu=dataclasses.replace(ideal().gpu, memory_bytes=3.6e9)
    )
    assert max(held) < 3.6e9 and not predict_program(program, little).fits


def test_products_are_counted_by_their_sizes() -> None:
    """They are those of the shape, and their FLOPs are the graph's."""
    program = program_of({"t": 2, "p": 2, "d": 2})
    rows = program.costs.products
    for stage in (0, 1):
        here = [row for row in rows if row.stage == stage]
        assert sum(row.forward for row in here) == program.costs.flops_per_stage[stage]
        assert sum(row.backward for row in here) == program.costs.backward_flops_per_stage[stage]
    sizes = Sizes(b=2, t=2, e=4)
    operators = [*layer_operators(SHAPE, sizes, "flash"), *head_operators(SHAPE, sizes)]
    wanted = {tuple(map(int, one.product)) for one in operators if one.product is not None}
    assert {row.sizes for row in rows if row.kind == "product"} == wanted
    assert {row.kind for row in rows} == {"product", "causal attention"}


def test_bytes_that_operators_move_are_those_of_the_shape() -> None:
    """Up to what a training system fuses: here every operator reads and writes memory itself."""
    program = program_of({"t": 2, "p": 2, "d": 2})
    sizes = Sizes(b=2, t=2, e=4)
    layers = SHAPE.layers * sum(
        one.moved for one in layer_operators(SHAPE, sizes, "flash") if not one.forward_flops
    )
    ends = sum(one.moved for one in (*embedding_operators(SHAPE, sizes), *head_operators(SHAPE, sizes)))
    assert sum(program.costs.moved_bytes_per_stage) == pytest.approx(layers + ends, rel=0.15)
    assert min(program.costs.kernels_per_stage) >= 2 * 12


def test_a_model_that_is_no_gpt_can_be_predicted() -> None:
    class Tower(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x).square().mean()

    slow, fast = (
        predict_program(
            autoptd.compile(Tower(), t=t, example_inputs=(torch.zeros(512, 256),), num_microbatches=1),
            "laptop-cpu",
        )
        for t in (1, 2)
    )
    assert fast.breakdown["compute"] < 0.7 * slow.breakdown["compute"]
    assert slow.breakdown["tp_comm"] == 0 < fast.breakdown["tp_comm"]
