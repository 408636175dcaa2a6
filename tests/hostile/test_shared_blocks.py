"""Models that repeat a whole block: its parameters are read several times in a stage, at other places by each rank.

Sums of their gradients once started in the middle of a backward, on the group of that backward's own all-reduces: in another
order on every tensor rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoptd
from autoptd.ir import machine

VOCAB, LENGTH, WIDTH = 32, 8, 16


class Block(nn.Module):
    def __init__(self, norm: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.n1, self.n2 = norm(WIDTH), norm(WIDTH)
        self.qkv, self.o = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.a, self.b = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (z.unflatten(-1, (4, 4)).transpose(1, 2) for z in self.qkv(self.n1(x)).chunk(3, -1))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.b(F.gelu(self.a(self.n2(x))))


class Model(nn.Module):
    """An embedding, `layers` in turn, a head; `tied`: the embedding is the head's."""

    def __init__(self, layers: list[nn.Module], tied: bool = False) -> None:
        super().__init__()
        self.emb, self.norm = nn.Embedding(VOCAB, WIDTH), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.emb.weight
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.emb(x)
        for layer in self.layers:
            h = layer(h)
        return F.cross_entropy(self.head(self.norm(h)).flatten(0, 1), y.flatten())


class Universal(Model):
    """Universal Transformer: one block, told by a vector for each turn which turn it is."""

    def __init__(self) -> None:
        super().__init__([Block()])
        self.turns = nn.Parameter(0.1 * torch.randn(4, WIDTH))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.emb(x)
        for turn in self.turns:
            h = self.layers[0](h + turn)
        return F.cross_entropy(self.head(self.norm(h)).flatten(0, 1), y.flatten())


def repeated(tied: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return Model([Block()] * 4, tied)


def in_pairs() -> nn.Module:
    return Model([Block(), Block(nn.RMSNorm)] * 3)


def sandwich() -> nn.Module:
    """Blocks of their own at both ends of a shared one."""
    return Model([Block(), *[Block()] * 3, Block()])


MODELS: dict[str, Callable[[], nn.Module]] = {
    "albert": repeated,
    "tied": lambda: repeated(tied=True),
    "universal": Universal,
    "pairs": in_pairs,
    "sandwich": sandwich,
}
MESHES: list[dict[str, Any]] = [
    {"t": 2, "p": 2, "d": d, **more}
    for d in (1, 2)
    for more in ({}, {"schedule": "gpipe"}, {"v": 2, "schedule": "interleaved"}, {"schedule": "zb_h1"})
] + [{"t": 4, "p": 2, "sequence_parallel": True}, {"t": 2, "p": 3, "d": 2, "sequence_parallel": True}]


@pytest.fixture(autouse=True)
def real_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """On which norms are computed by every tensor rank: their parameters are of type R."""
    monkeypatch.setattr(machine, "DEFAULT", machine.Machine())


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randint(0, VOCAB, (12, LENGTH), generator=generator) for _ in range(2))
    return x, y


@pytest.mark.one_in(78)
@pytest.mark.parametrize(("kind", "mesh"), [(kind, mesh) for mesh in MESHES for kind in MODELS], ids=str)
def test_parity(kind: str, mesh: dict[str, Any]) -> None:
    torch.manual_seed(0)
    autoptd.verify(MODELS[kind](), example_inputs=batch(), num_microbatches=3, steps=2, **mesh)


class Regularised(Model):
    """One block three times, and all parameters in the loss once more."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.emb(x)
        for _ in range(3):
            h = self.layers[0](h)
        loss = F.cross_entropy(self.head(self.norm(h)).flatten(0, 1), y.flatten())
        return loss + 0.01 * sum(p.square().sum() for p in self.parameters())


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_gradients_of_copies_are_equal_to_the_bit(sequence_parallel: bool) -> None:
    """A row bias that one rank added itself and others as zeros: what reads it came together in two orders."""
    torch.manual_seed(0)
    model = Regularised([Block()])
    for p in model.parameters():
        nn.init.normal_(p, std=0.5)
    x = torch.randint(VOCAB, (4, LENGTH))
    pm = autoptd.parallelize(
        model, t=2, sequence_parallel=sequence_parallel, backend="local", example_inputs=(x, x)
    )
    pm.step(x, x)
    ranks = [
        {name: p.grad.as_subclass(Tensor) for name, p in pm.rank_parameters(rank).items()} for rank in (0, 1)
    ]
    copies = [spec.name for spec in pm.program.params if spec.storage.layout["tp"].is_whole]
    assert "layers.0.o.bias" in copies and "layers.0.b.bias" in copies
    assert [name for name in copies if not torch.equal(ranks[0][name], ranks[1][name])] == []
    pm.close()
