"""Small decoders with rotary positions: like Llama (grouped queries, RMS norms, a gated MLP) and like GPT-NeoX (q, k and v of a
head side by side in one weight, attention and MLP in parallel).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.parity.models import VOCAB


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Turn the pairs (i, i + size / 2) of every head by its position's angles; what is beyond them stays."""
    turned, rest = x[..., : 2 * angles.shape[-1]], x[..., 2 * angles.shape[-1] :]
    first, second = turned.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


class LlamaBlock(nn.Module):
    def __init__(self, width: int, heads: int, kv: int) -> None:
        super().__init__()
        self.heads, self.kv, self.size = heads, kv, width // heads
        self.norm, self.q = nn.RMSNorm(width), nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, kv * self.size, bias=False) for _ in range(2))
        self.out, self.post = nn.Linear(width, width, bias=False), nn.RMSNorm(width)
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (one(y).unflatten(-1, (-1, self.size)).transpose(1, 2) for one in (self.q, self.k, self.v))
        k, v = (one.repeat_interleave(self.heads // self.kv, 1) for one in (rotate(k, angles), v))
        z = F.scaled_dot_product_attention(rotate(q, angles), k, v, is_causal=True)
        x = x + self.out(z.transpose(1, 2).flatten(2))
        y = self.post(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class NeoxBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.post = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        qkv = self.qkv(self.norm(x)).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        q, k, v = qkv.chunk(3, dim=-1)
        z = F.scaled_dot_product_attention(rotate(q, angles), rotate(k, angles), v, is_causal=True)
        return x + self.out(z.transpose(1, 2).flatten(2)) + self.down(F.gelu(self.up(self.post(x))))


class Decoder(nn.Module):
    """`turned` is how many angles every position has."""

    def __init__(self, blocks: list[nn.Module], width: int, turned: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, width), nn.Linear(width, VOCAB, bias=False)
        self.layers, self.norm = nn.ModuleList(blocks), nn.LayerNorm(width)
        self.frequencies: Tensor
        self.register_buffer("frequencies", 10000.0 ** -(torch.arange(turned) / turned), persistent=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        angles = torch.outer(torch.arange(ids.shape[1], device=ids.device), self.frequencies)
        for layer in self.layers:
            x = layer(x, angles)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def llama(layers: int = 6, width: int = 16, heads: int = 4, kv: int = 2) -> Decoder:
    torch.manual_seed(0)
    return Decoder([LlamaBlock(width, heads, kv) for _ in range(layers)], width, width // heads // 2)


def neox(layers: int = 6, width: int = 16, heads: int = 2) -> Decoder:
    torch.manual_seed(0)
    return Decoder([NeoxBlock(width, heads) for _ in range(layers)], width, width // heads // 4)
