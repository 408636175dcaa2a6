"""Small models written as users write them, for whole-model runs; nothing here knows that it will be partitioned."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoptd.ir.machine import Machine
from examples.gpt import GPT, GPTConfig

VOCAB, LENGTH = 64, 8
# Collectives start at once: models as small as these are split.
MACHINE = Machine(latency=1e-9)


def gpt(
    layers: int = 4,
    heads: int = 4,
    width: int = 32,
    vocab: int = VOCAB,
    *,
    length: int = LENGTH,
    dropout: float = 0.0,
) -> GPT:
    """The example's GPT: fused [3, heads, head_dim] QKV, tied embeddings."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": vocab, "block_size": length, "n_layer": layers, "n_head": heads}
    return GPT(GPTConfig(**sizes, n_embd=width, dropout=dropout))


def dropping_gpt(layers: int = 4) -> GPT:
    """Dropout after the embeddings, in attention (fused), after its projection and after the MLP."""
    return gpt(layers, dropout=0.1)


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


class Blocks(nn.Module):
    """An embedding, blocks one behind the other, a head."""

    def __init__(self, blocks: Iterable[nn.Module], width: int, vocab: int = VOCAB) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocab, width), nn.Linear(width, vocab, bias=False)
        self.layers = nn.ModuleList(blocks)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Mixer(nn.Module):
    """A residual block: attention over the tokens without heads, then an MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.down(F.gelu(self.up(x)))


class UNet(nn.Module):
    """Skips that nest: what the k-th block on the way down makes is read by the k-th from the end, the first by the last."""

    def __init__(self, depth: int = 6, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.down = nn.ModuleList(Mixer(width) for _ in range(depth))
        self.up = nn.ModuleList(Mixer(width) for _ in range(depth))
        self.joins = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(depth))
        self.head = nn.Linear(width, VOCAB)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x, skips = self.embed(ids), []
        for block in self.down:
            x = block(x)
            skips.append(x)
        for block, join in zip(self.up, self.joins, strict=True):
            x = block(join(torch.cat((x, skips.pop()), dim=-1)))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def unet(depth: int = 6) -> UNet:
    torch.manual_seed(0)
    return UNet(depth)


class SharedBlock(nn.Module):
    """One block many times (Universal Transformer, ALBERT): its weights are used by every stage; only the scales differ."""

    def __init__(self, times: int = 12, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.block = Mixer(width)
        self.scales = nn.Parameter(1 + 0.1 * torch.randn(times, width))
        self.head = nn.Linear(width, VOCAB, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for scale in self.scales:
            x = self.block(x * scale)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def shared_block(times: int = 12) -> SharedBlock:
    torch.manual_seed(0)
    return SharedBlock(times)


class CrossBlock(nn.Module):
    """A decoder layer: tokens before it, then the whole of what the encoder made."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mixer = Mixer(width)
        self.norm = nn.LayerNorm(width)
        self.q, self.kv, self.out = (
            nn.Linear(width, width),
            nn.Linear(width, 2 * width),
            nn.Linear(width, width),
        )

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        k, v = self.kv(memory).chunk(2, dim=-1)
        return self.mixer(x + self.out(F.scaled_dot_product_attention(self.q(self.norm(x)), k, v)))


class EncoderDecoder(nn.Module):
    """Two inputs of other lengths; every decoder layer reads the encoder's output; one table embeds both."""

    def __init__(self, depth: int = 6, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.encoder = nn.ModuleList(Mixer(width) for _ in range(depth))
        self.decoder = nn.ModuleList(CrossBlock(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)

    def forward(self, source: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
        memory, x = self.embed(source), self.embed(ids)
        for layer in self.encoder:
            memory = layer(memory)
        for layer in self.decoder:
            x = layer(x, memory)
        logits = F.linear(self.norm(x), self.embed.weight)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def encoder_decoder(depth: int = 6) -> EncoderDecoder:
    torch.manual_seed(0)
    return EncoderDecoder(depth)


def source_batch(rows: int = 8) -> Tensor:
    """Inputs of the encoder, as many rows as `batch` has."""
    return torch.randint(0, VOCAB, (rows, LENGTH - 3), generator=torch.Generator().manual_seed(2))
