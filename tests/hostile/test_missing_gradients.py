"""A gradient that is None in torch stays None: optimizers then leave the parameter alone, where zeros would decay it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoptd

WIDTH, VOCAB = 16, 32


class Model(nn.Module):
    """Four layers; `add` says what joins each of them, of the parameter `like` and of a value computed at the start."""

    def __init__(self, add: Callable[[Tensor, Tensor, int], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.emb, self.out = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.like, self.side = nn.Parameter(torch.rand(WIDTH)), nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))
            for _ in range(4)
        )
        self.add = add

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.emb(x)
        k = self.side(h)
        for i, layer in enumerate(self.layers):
            h = h + layer(h) + self.add(self.like, k, i)
        return F.cross_entropy(self.out(h).flatten(0, 1), y.flatten())


CASES: dict[
    str, tuple[Callable[[Tensor, Tensor, int], Tensor], set[str]]
] = {  # and which gradients are None in torch
    "a parameter's shape on several stages": (
        lambda like, k, i: torch.zeros_like(like),
        {"like", "side.weight", "side.bias"},
    ),
    "the shape of a value that crosses": (
        lambda like, k, i: torch.full_like(k, 0.5),
        {"like", "side.weight", "side.bias"},
    ),
    "a value on the first stage, its shape on the last": (
        lambda like, k, i: k if i == 0 else torch.ones_like(k),
        {"like"},
    ),
    "a parameter on the last stage, its shape on the others": (
        lambda like, k, i: like if i == 3 else torch.zeros_like(like),
        {"side.weight", "side.bias"},
    ),
    "a value times ones of its shape": (lambda like, k, i: k * torch.ones_like(k) + like, set()),
}
MESHES: list[dict[str, Any]] = [{"p": 2}, {"t": 2, "p": 2, "d": 2, "num_microbatches": 2}, {"t": 2}]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_none_stays_none(name: str, mesh: dict[str, Any]) -> None:
    add, missing = CASES[name]
    model, reference = Model(add).double(), Model(add).double()
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randint(0, VOCAB, (8, 6), generator=generator) for _ in range(2))
    pm = autoptd.parallelize(model, **mesh, backend="local", example_inputs=(x, y))
    ours = pm.optimizer(torch.optim.AdamW, lr=0.1, weight_decay=0.1)
    theirs = torch.optim.AdamW(reference.parameters(), lr=0.1, weight_decay=0.1)
    for _ in range(2):
        reference(x, y).backward()
        assert {name for name, one in reference.named_parameters() if one.grad is None} == missing
        pm.step(x, y)
        assert missing.isdisjoint(pm.gradients())
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    state = pm.state_dict()
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(state[name], parameter.detach(), rtol=1e-9, atol=1e-12)
    pm.close()
