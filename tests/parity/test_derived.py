"""Weights that are computed from other weights, and heads that are modules of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import autoptd
from tests.parity.models import VOCAB, batch

WIDTH = 32


class Lora(nn.Module):
    """A frozen weight, and a product of two narrow ones that is trained (Hu et al. 2021)."""

    def __init__(self, inner: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, inner.in_features) / inner.in_features**0.5)
        self.b = nn.Parameter(0.1 * torch.randn(inner.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + 2.0 * F.linear(F.linear(x, self.a), self.b)


class Merged(Lora):
    """The same as one weight, made in every step."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.inner.weight + 2.0 * self.b @ self.a, self.inner.bias)


class Head(nn.Module):
    """One head of attention: its own queries, keys and values."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, size, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.q(x) @ self.k(x).transpose(-2, -1) * self.k.out_features**-0.5
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        return scores.masked_fill(future, float("-inf")).softmax(-1) @ self.v(x)


class HeadByHead(nn.Module):
    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.heads = nn.ModuleList(Head(WIDTH // heads) for _ in range(heads))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.cat([head(x) for head in self.heads], dim=-1))


class Fused(nn.Module):
    """Attention by one module for q, k and v; `adapt` wraps its linear layers."""

    def __init__(self, adapt: Callable[[nn.Linear], nn.Module], heads: int = 4) -> None:
        super().__init__()
        self.size = WIDTH // heads
        self.qkv, self.out = adapt(nn.Linear(WIDTH, 3 * WIDTH)), adapt(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one.unflatten(-1, (-1, self.size)).transpose(1, 2) for one in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, attention: Callable[[], nn.Module], adapt: Callable[[nn.Linear], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.attention = nn.ModuleList(attention() for _ in range(2))
        self.up = nn.ModuleList(adapt(nn.Linear(WIDTH, 2 * WIDTH)) for _ in range(2))
        self.down = nn.ModuleList(adapt(nn.Linear(2 * WIDTH, WIDTH)) for _ in range(2))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for attention, up, down in zip(self.attention, self.up, self.down, strict=True):
            x = x + attention(F.layer_norm(x, (WIDTH,)))
            x = x + down(F.gelu(up(F.layer_norm(x, (WIDTH,)))))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


STYLES: dict[str, Callable[[], nn.Module]] = {
    "lora": lambda: Model(lambda: Fused(Lora), Lora),
    "lora, merged": lambda: Model(lambda: Fused(Merged), Merged),
    "weight norm": lambda: Model(lambda: Fused(weight_norm), weight_norm),
    "a module for each head": lambda: Model(HeadByHead, lambda one: one),
}
MESHES: list[dict[str, Any]] = [{"t": 2, "p": 2}, {"t": 4, "d": 2, "sequence_parallel": True}]


@pytest.mark.one_in(99)
@pytest.mark.filterwarnings("ignore:.*of the FLOPs of matrix products")
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("style", STYLES)
def test_parity(style: str, mesh: dict[str, Any]) -> None:
    autoptd.verify(STYLES[style](), **mesh, num_microbatches=2, example_inputs=batch(8), steps=2)


def test_derived_weights_are_derived_in_shards() -> None:
    """The frozen weight, its adapters and what they make are all split by rows, so that no rank makes a whole weight."""
    program = autoptd.compile(STYLES["lora, merged"](), t=2, example_inputs=batch(8), machine="h100")
    types = {one.name: str(one.use.layout["tp"]) for one in program.params if one.name.startswith("up.0")}
    assert types["up.0.inner.weight"].startswith("S(0") and types["up.0.b"].startswith("S(0")
    assert program.costs.redundant_gemm_flops == 0
