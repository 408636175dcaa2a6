"""The ledger: predicted bytes are those of the tensors that are there, for every rank and kind."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoptd
from autoptd.program.state_memory import StateMemory
from tests.parity.models import batch, gpt

GPT: list[dict[str, Any]] = [
    {},
    {"t": 2, "p": 2, "v": 2, "num_microbatches": 4},
    {"t": 2, "p": 2, "d": 2, "zero": 1},
    {"p": 2, "d": 4, "zero": 1, "dp_shard": 2, "precision": "bf16"},
    {"c": 2, "d": 2, "zero": 1, "precision": "bf16"},
    {"d": 2, "precision": "fp16", "loss_scale": 2.0**10, "t": 2},
    {"t": 2, "d": 2, "accumulate_allreduce_grads_in_fp32": True},
    {"d": 3, "zero": 1, "precision": "bf16", "schedule": "gpipe"},
]


@pytest.mark.one_in(30)
@pytest.mark.parametrize(("dtype", "mesh"), list(itertools.product([torch.float32, torch.bfloat16], GPT)))
def test_what_is_predicted_is_there(dtype: torch.dtype, mesh: dict[str, Any]) -> None:
    if mesh.get("precision") == "fp16":
        dtype = torch.float32
    compare(gpt().to(dtype), batch(12 if mesh.get("d") == 3 else 8), mesh)


class Sum(nn.Module):
    """Parameters of odd sizes, one of them frozen."""

    SIZES = (3, 100, 64, 1, 7, 1000)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(size, 1, bias=False) for size in self.SIZES)
        self.layers[1].weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.layers[0].weight.dtype)
        each = [layer(x[:, : layer.in_features]).mean() for layer in self.layers]
        return torch.stack(each).mean()


@pytest.mark.parametrize(
    "d", [1, 2, 3, 8, *(pytest.param(d, marks=pytest.mark.thorough) for d in (4, 5, 6, 7))]
)
def test_sizes_that_replicas_do_not_divide(d: int) -> None:
    keywords = {"d": d, "zero": 1, "precision": "bf16", "num_microbatches": 1}
    total = compare(Sum(), (torch.randn(2 * d, 1000),), keywords)
    trained = [size for size in Sum.SIZES if size != 100]
    if d == 1:
        # 2 + 4 + 4 + 8 bytes of what is trained, 2 + 4 of what is not.
        assert total == 18 * sum(trained) + 6 * 100


def compare(model: nn.Module, data: tuple[Tensor, ...], keywords: dict[str, Any]) -> int:
    """Train two steps, and compare what ranks hold with what was predicted; the bytes of rank 0."""
    pm = autoptd.parallelize(model, **keywords, backend="local", example_inputs=data, timeout=60)
    optimizer = pm.optimizer(torch.optim.AdamW)
    fresh = pm.memory()[0]
    assert (fresh.gradients, fresh.moments) == (0, 0)
    for _ in range(2):
        pm.step(*data)
        optimizer.step()
        optimizer.zero_grad()
    predicted = {rank: pm.program.memory(rank) for rank in range(pm.program.mesh.size)}
    assert pm.memory() == predicted
    pm.close()
    return predicted[0].total


def test_a_total_is_of_all_kinds() -> None:
    assert StateMemory(1, 2, 4, 8).total == 15
