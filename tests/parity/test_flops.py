"""FLOPs that ranks execute: ceil(total / t) for every product of a GPT, equal to what the program says, forward and back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoptd
from autoptd.runtime.measure.work import Work
from tests.parity.models import LENGTH, VOCAB, batch, gpt, separate

ROWS, WIDTH, LAYERS = 8, 32, 4
MESHES: list[dict[str, int]] = [
    {"t": 1, "p": 1, "d": 1, "v": 1, "num_microbatches": 2},
    {"t": 2, "p": 1, "d": 1, "v": 1, "num_microbatches": 2},
    {"t": 4, "p": 2, "d": 1, "v": 1, "num_microbatches": 4},
    {"t": 2, "p": 2, "d": 2, "v": 2, "num_microbatches": 4},  # one row per microbatch
]
# Of a microbatch, forward, on one device: FLOPs of one layer's products by (module below the layer, operator).
LAYER = {
    ("attn.c_attn", "aten.linear"): 2 * WIDTH * 3 * WIDTH,
    ("attn", "aten.scaled_dot_product_attention"): 2 * 2 * LENGTH * WIDTH,
    ("attn.c_proj", "aten.linear"): 2 * WIDTH * WIDTH,
    ("mlp.c_fc", "aten.linear"): 2 * WIDTH * 4 * WIDTH,
    ("mlp.c_proj", "aten.linear"): 2 * 4 * WIDTH * WIDTH,
}  # per token


def recorded(
    model: nn.Module, inputs: tuple[Tensor, ...], mesh: dict[str, Any]
) -> tuple[autoptd.Program, list[list[Work]]]:
    pm = autoptd.parallelize(model, **mesh, backend="local", example_inputs=inputs)
    with pm.record() as record:
        pm.step(*inputs)
    program = pm.program
    pm.close()
    return program, [record.work_of(rank) for rank in range(program.mesh.size)]


def gemms(work: list[Work], phase: str) -> Counter[tuple[int, str, str]]:
    found: Counter[tuple[int, str, str]] = Counter()
    for one in work:
        if one.flops and one.phase == phase:
            found[one.stage, one.module, one.operator] += one.flops
    return found


@pytest.mark.parametrize(
    "mesh", MESHES, ids=lambda mesh: "t{t}p{p}d{d}v{v}m{num_microbatches}".format(**mesh)
)
def test_every_product_of_a_gpt_is_its_share_of_the_whole(mesh: dict[str, int]) -> None:
    t, p, d, v, _ = mesh.values()
    stages, rows = p * v, ROWS // d  # of a replica and step
    program, work = recorded(gpt(LAYERS, width=WIDTH), batch(ROWS), mesh)
    for rank, done in enumerate(work):
        expected: Counter[tuple[int, str, str]] = Counter()
        for stage in range(stages):
            if stage % p == program.mesh.coordinate(rank).pp:
                for (module, operator), per_token in LAYER.items():
                    total = per_token * rows * LENGTH * LAYERS // stages
                    expected[stage, f"transformer.h.*.{module}", operator] = -(-total // t)
                if stage == stages - 1:
                    expected[stage, "lm_head", "aten.linear"] = -(-2 * WIDTH * VOCAB * rows * LENGTH // t)
        assert gemms(done, "forward") == expected
        fused = {key: 5 * n // 2 if "attention" in key[2] else 2 * n for key, n in expected.items()}
        assert gemms(done, "backward") == fused
        assert not gemms(done, "step")


@pytest.mark.parametrize("make", [gpt, separate])
@pytest.mark.parametrize(
    "mesh", MESHES, ids=lambda mesh: "t{t}p{p}d{d}v{v}m{num_microbatches}".format(**mesh)
)
def test_costs_of_the_program_are_what_is_executed(
    make: Callable[[], nn.Module], mesh: dict[str, int]
) -> None:
    program, work = recorded(make(), batch(ROWS), mesh)
    costs, m = program.costs, program.num_microbatches
    told: dict[str, Counter[tuple[int, str, str]]] = {"forward": Counter(), "backward": Counter()}
    for row in costs.gemms:
        for phase, found in told.items():
            found[row.stage, row.module, row.operator] = m * getattr(row, phase)
    replica = [
        done
        for rank, done in enumerate(work)
        if program.mesh.coordinate(rank).tp == program.mesh.coordinate(rank).dp == 0
    ]
    for phase, found in told.items():
        executed: Counter[tuple[int, str, str]] = Counter()
        for done in replica:
            executed += gemms(done, phase)
        assert executed == found
    assert costs.redundant_gemm_flops == 0
    assert sum(costs.flops_per_stage) == sum(row.forward for row in costs.gemms)
    assert sum(costs.flops_per_stage) * program.mesh.t == costs.total_flops  # here everything divides
    for one in gemms(work[0], "backward"):
        assert one[0] >= 0, "a product of the backward was charged to no line"


@pytest.mark.parametrize("wgrad", ["main_grads", "before_reduce", "after_b"])
def test_hooks_on_linear_layers_change_no_product(wgrad: str) -> None:
    """What waits for its W is charged to the stage, and to no line."""
    hooks: dict[str, Any] = {
        "async_tensor_model_parallel_allreduce": True,
        "accumulate_allreduce_grads_in_fp32": True,
    }
    hooks |= {} if wgrad == "main_grads" else {"delay_wgrad_compute": wgrad}
    mesh = {
        "t": 2,
        "p": 2,
        "num_microbatches": 2,
        "plan": {"cut": [1, 1]},
    }  # other schedules ask for other cuts
    (plain, usual), (hooked, work) = (recorded(gpt(2), batch(ROWS), mesh | more) for more in ({}, hooks))
    assert "rt.linear(" in "".join(hooked.sources.values())
    for name in ("flops_per_stage", "backward_flops_per_stage", "total_flops"):
        assert getattr(hooked.costs, name) == getattr(plain.costs, name)
    for rank in range(4):
        for phase in ("forward", "backward"):
            stages: list[Counter[int]] = [Counter(), Counter()]
            for sums, done in zip(stages, (usual[rank], work[rank]), strict=True):
                for (stage, _, _), flops in gemms(done, phase).items():
                    sums[stage] += flops
            assert stages[0] == stages[1]
        has_a_line = [bool(one.module) for one in work[rank] if one.flops and one.phase == "backward"]
        assert all(has_a_line) == (wgrad == "main_grads")


def test_what_every_tensor_rank_computes_in_full_is_norms_and_residuals() -> None:
    _, work = recorded(gpt(LAYERS, width=WIDTH), batch(ROWS), {"t": 2, "num_microbatches": 2})
    whole = {(one.module, one.operator) for one in work[0] if one.is_whole and one.elements}
    assert whole == {
        ("transformer", "aten.arange"),
        ("transformer.h.*", "aten.add"),
        ("transformer.h.*.ln_1", "aten.layer_norm"),
        ("transformer.h.*.ln_2", "aten.layer_norm"),
        ("transformer.ln_f", "aten.layer_norm"),
        ("transformer", "aten.add"),
    }
    residuals = [one for one in work[0] if one.module == "transformer.h.*" and one.phase == "forward"]
    assert [one.elements for one in residuals] == [2 * LAYERS * ROWS * LENGTH * WIDTH]
    assert not any(one.is_whole and one.flops for one in work[0])
    _, alone = recorded(gpt(LAYERS, width=WIDTH), batch(ROWS), {"num_microbatches": 2})
    assert not any(one.is_whole for one in alone[0])


class Frozen(nn.Module):
    """A linear layer whose weight is frozen: its backward is one product."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.fixed, self.head = (
            nn.Embedding(VOCAB, 8),
            nn.Linear(8, 8),
            nn.Linear(8, VOCAB, bias=False),
        )
        self.fixed.weight.requires_grad_(False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(torch.tanh(self.fixed(self.embed(ids))))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


@pytest.mark.filterwarnings("ignore:.*of the FLOPs of matrix products")
def test_a_frozen_weight_costs_no_gradient_and_what_stays_whole_is_redundant() -> None:
    """Eight features do not divide by three: every rank computes the product in full."""
    program, work = recorded(Frozen(), batch(ROWS), {"t": 3, "num_microbatches": 1})
    total = 2 * 8 * 8 * ROWS * LENGTH
    (row,) = [row for row in program.costs.gemms if row.module == "fixed"]
    assert row.total == row.forward == row.backward == row.redundant == total
    assert program.costs.redundant_gemm_flops == total
    for done in work:
        found = [(one.phase, one.flops, one.is_whole) for one in done if one.module == "fixed" and one.flops]
        assert found == [("forward", total, True), ("backward", total, True)]
