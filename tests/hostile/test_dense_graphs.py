"""Graphs too dense for the exact solver: a near plan is found, said to be near, and right."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import autoptd
from tests.hostile.against_torch import assert_parity


class Dense(nn.Module):
    """Every layer reads the outputs of all before it."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
            for _ in range(depth)
        )

    def forward(self, x: Tensor) -> Tensor:
        outputs = [x]
        for layer in self.layers:
            outputs.append(layer(sum(outputs) / len(outputs)))  # type: ignore[arg-type]
        return sum(outputs).square().mean()  # type: ignore[union-attr]


@pytest.mark.parametrize("mesh", [{"t": 2, "num_microbatches": 2}, {"t": 1, "num_microbatches": 4}], ids=str)
def test_a_dense_net(mesh: dict[str, int]) -> None:
    batches = [(torch.randn(8, 4, 8),), (torch.randn(8, 4, 8),)]
    assert_parity(Dense(12), batches, **mesh)


@pytest.mark.thorough
def test_it_is_said() -> None:
    program = autoptd.compile(Dense(12), t=2, num_microbatches=2, example_inputs=(torch.randn(8, 4, 8),))
    assert any("a search found a near one" in one.fact for one in program.fallbacks)
    again = autoptd.compile(Dense(12), t=2, num_microbatches=2, example_inputs=(torch.randn(8, 4, 8),))
    assert again.sources == program.sources
