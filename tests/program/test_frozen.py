"""What is frozen is left out of what a program says of its work and time; a model that is trained whole is counted as ever."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autoptd
from autoptd.ir.actions import Kind
from autoptd.ir.machine import Machine
from autoptd.program.program import Program
from autoptd.wings.reports.pictures import simulated_run
from autoptd.wings.reports.summary import summarize
from tests.parity.test_peft import MACHINE, VOCAB, WIDTH, adapted, batch, llama

# Products alone take time.
PRODUCTS = Machine(memory_bandwidth=1e30, link_bandwidth=1e30, latency=0.0)
MESHES: tuple[dict[str, Any], ...] = ({}, {"t": 2}, {"p": 2, "d": 2, "num_microbatches": 2})
WIDE, LAYERS, HALF = 16, 6, 3


def compiled(model: nn.Module, **mesh: Any) -> Program:
    return autoptd.compile(model, example_inputs=batch(), machine=MACHINE, **{"num_microbatches": 1, **mesh})


@pytest.mark.one_in(9)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_the_flops_of_a_step(mesh: dict[str, Any]) -> None:
    whole, program = compiled(llama(), **mesh), compiled(adapted("LoRA"), **mesh)
    tokens, length = 32, 8
    assert summarize(whole).model_flops == 3 * whole.costs.total_flops * whole.num_microbatches * whole.mesh.d
    parameters = dict(adapted("LoRA").named_parameters())
    products = {name: x for name, x in parameters.items() if x.dim() == 2 and "embed" not in name}
    frozen = sum(x.numel() for name, x in products.items() if "lora" not in name)
    trained = sum(x.numel() for name, x in products.items() if "lora" in name)
    # Nothing asks for the gradient of the input of the first layer, which a frozen embedding has made.
    own = [
        x
        for name, x in products.items()
        if "layers.0.self_attn" in name and "o_proj" not in name and "lora_B" not in name
    ]
    first = sum(x.numel() for x in own)
    scores = 2 * 2 * 2 * length * WIDTH
    expected = tokens * (4 * frozen + 6 * trained - 2 * first + 3 * scores)
    assert summarize(program).model_flops == expected


class Tower(nn.Module):
    """Equal products: the first ones are frozen, or those behind a trained one."""

    def __init__(self, frozen: range) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDE, WIDE, bias=False) for _ in range(LAYERS))
        self.embed, self.head = nn.Embedding(VOCAB, WIDE), nn.Linear(WIDE, 1)
        for i in frozen:
            self.layers[i].requires_grad_(False)
        if 0 in frozen:
            self.embed.requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x).relu()
        return F.mse_loss(self.head(x), torch.ones_like(x[..., :1]))


def tower(frozen: range) -> Program:
    ids = torch.zeros(4, 8, dtype=torch.long)
    asked: dict[str, Any] = {
        "p": 2,
        "num_microbatches": 2,
        "plan": {"cut": [HALF, HALF]},
        "machine": PRODUCTS,
    }
    return autoptd.compile(Tower(frozen), example_inputs=(ids,), fuse=False, **asked)


def test_the_seconds_of_stages() -> None:
    """Of products alone: two where a weight is frozen, and forward alone before all that is trained."""
    whole, first, last = (
        tower(frozen).costs.cut.seconds for frozen in (range(0), range(HALF), range(HALF, LAYERS))
    )
    # The head is trained, and a product of a single column.
    all_of_it = 3 * HALF * WIDE + 3
    assert last[0] == pytest.approx(whole[0], abs=0) and first[0] == pytest.approx(whole[0] / 3, abs=0)
    assert last[1] / whole[1] == pytest.approx((all_of_it - HALF * WIDE) / all_of_it)
    # Behind what is frozen, one layer has a weight's gradient and no input's.
    assert first[1] / whole[1] == pytest.approx((all_of_it - WIDE) / all_of_it)


def test_the_simulated_step() -> None:
    """A frozen stage has no backward, and one whose weights are frozen takes as long backward as forward."""
    for frozen, stage, ratio in ((range(0), 1, 2.0), (range(HALF, LAYERS), 1, 1.0), (range(HALF), 0, 0.0)):
        spans = simulated_run(tower(frozen)).spans[stage]
        seconds = {
            kind: sum(end - start for action, start, end in spans if action.kind == kind)
            for kind in (Kind.F, Kind.B)
        }
        assert seconds[Kind.B] / seconds[Kind.F] == pytest.approx(ratio, abs=0.05)
