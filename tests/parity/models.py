"""Small models written as users write them, for whole-model runs; nothing here knows that it will be partitioned."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.gpt import GPT, GPTConfig

VOCAB, LENGTH = 64, 8


def gpt(layers: int = 4, heads: int = 4, width: int = 32, vocab: int = VOCAB) -> GPT:
    """The example's GPT: fused [3, heads, head_dim] QKV, tied embeddings."""
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab_size=vocab, block_size=LENGTH, n_layer=layers, n_head=heads, n_embd=width))


def batch(rows: int = 8, vocab: int = VOCAB) -> tuple[Tensor, Tensor]:
    """(ids, targets), the same on every call."""
    generator = torch.Generator().manual_seed(1)
    ids, targets = (torch.randint(0, vocab, (rows, LENGTH), generator=generator) for _ in range(2))
    return ids, targets


def uneven(targets: Tensor) -> Tensor:
    """Labels ignored at other counts in every row, one row ignored whole."""
    targets = targets.clone()
    for row in range(targets.shape[0]):
        targets[row, : (5 * row) % (targets.shape[1] + 1)] = -100
    return targets


class SeparateAttention(nn.Module):
    """Q, K and V as three projections, softmax written out, a mask in a buffer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.v_proj, self.out_proj = nn.Linear(width, width, bias=False), nn.Linear(width, width)
        self.heads = heads
        self.register_buffer("mask", torch.tril(torch.ones(LENGTH, LENGTH, dtype=torch.bool)))

    def forward(self, x: Tensor) -> Tensor:
        b, s, h = x.shape

        def split(y: Tensor) -> Tensor:
            return y.view(b, s, self.heads, h // self.heads).transpose(1, 2)

        q, k, v = split(self.q_proj(x)), split(self.k_proj(x)), split(self.v_proj(x))
        scores = q @ k.transpose(-2, -1) / (h // self.heads) ** 0.5
        scores = scores.masked_fill(~self.mask[:s, :s], float("-inf"))
        y = scores.softmax(-1) @ v
        return self.out_proj(y.transpose(1, 2).reshape(b, s, h))


class SeparateBlock(nn.Module):
    """Parallel attention and a gated MLP behind one norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = SeparateAttention(width, heads)
        self.gate, self.up = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.attention(y) + self.down(F.silu(self.gate(y)) * self.up(y))


class Separate(nn.Module):
    """Untied embeddings, separate Q, K, V; `reduction` is that of its cross-entropy."""

    def __init__(self, layers: int = 4, width: int = 32, heads: int = 4, reduction: str = "mean") -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.positions = nn.Parameter(0.1 * torch.randn(LENGTH, width))
        self.layers = nn.ModuleList(SeparateBlock(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCAB)
        self.reduction = reduction

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(ids) + self.positions[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return {
            "logits": logits,
            "loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction=self.reduction),
        }


def separate(layers: int = 4, reduction: str = "mean") -> Separate:
    torch.manual_seed(0)
    return Separate(layers, reduction=reduction)


class Skipping(nn.Module):
    """A long skip: later stages read an input and a value of the first layers."""

    def __init__(self, width: int = 16, layers: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 32), nn.Tanh(), nn.Linear(32, width)) for _ in range(layers)
        )
        self.head = nn.Linear(width, VOCAB)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = first = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        x = x + first + self.embed(labels.roll(1, 1))
        return F.cross_entropy(self.head(x).view(-1, VOCAB), labels.view(-1))


def skipping() -> Skipping:
    torch.manual_seed(0)
    return Skipping()
