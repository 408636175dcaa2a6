"""Conversions give the reason of Megatron's plan, or the price of what the solver did not choose."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import autoptd


class Net(nn.Module):
    """An MLP with a residual, and a head over classes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(8)
        self.head = nn.Linear(8, 16)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = x + self.down(self.up(x).relu())
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


@pytest.fixture(scope="module")
def call() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 8, 8), torch.zeros(4, 8, dtype=torch.long)


def reasons(call: tuple[Tensor, Tensor], **keywords: object) -> set[str]:
    program = autoptd.compile(Net(), t=2, num_microbatches=1, example_inputs=call, **keywords)  # type: ignore[arg-type]
    return {one.why for one in program.collectives}


def test_megatrons_words_and_the_price_of_a_split_loss(call: tuple[Tensor, Tensor]) -> None:
    given = reasons(call, machine=autoptd.Machine(latency=15e-6))
    assert "column-parallel input: gradient all-reduced over tp" in given
    assert "bias added on tp rank 0 only" in given
    assert "row-parallel output: partial sums all-reduced over tp" in given
    assert any(why.endswith(" us cheaper than a vocabulary-parallel loss") for why in given), given


def test_shards_of_tokens(call: tuple[Tensor, Tensor]) -> None:
    given = reasons(call, sequence_parallel=True, machine=autoptd.Machine(latency=1e-9))
    assert any(why.endswith("residual is token-sharded") for why in given)
    assert "column-parallel input: all-gathered, gradient reduce-scattered over tp" in given
