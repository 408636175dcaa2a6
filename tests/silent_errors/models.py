"""Small decoders with the structures of the threads, written as users write them: nothing here knows of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, LENGTH, WIDTH, HEADS, ROWS = 32, 8, 16, 4, 8
Loss = Callable[[Tensor, Tensor], Tensor]


def batch(rows: int = ROWS, length: int = LENGTH, vocab: int = VOCAB, seed: int = 1) -> tuple[Tensor, Tensor]:
    """(ids, labels)."""
    generator = torch.Generator().manual_seed(seed)
    ids, labels = (torch.randint(0, vocab, (rows, length), generator=generator) for _ in range(2))
    return ids, labels


def uneven(labels: Tensor) -> Tensor:
    """The labels with another number of them ignored in every row, and all of them in the first."""
    labels = labels.clone()
    for row in range(labels.shape[0]):
        labels[row, : (3 * row + LENGTH) % (LENGTH + 1)] = -100
    return labels


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Attention(nn.Module):
    """Causal attention: fewer heads for keys with `kv`, `normed` queries and keys, a `window`, or `sees`, a mask [b, s, s]."""

    def __init__(self, kv: int = HEADS, normed: bool = False, window: int = 0) -> None:
        super().__init__()
        self.window, self.kv, size = window, kv, WIDTH // HEADS
        self.q, self.k = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, kv * size, bias=False)
        self.v, self.out = nn.Linear(WIDTH, kv * size, bias=False), nn.Linear(WIDTH, WIDTH)
        self.q_norm, self.k_norm = (nn.RMSNorm(size) if normed else nn.Identity() for _ in range(2))
        for norm in (self.q_norm, self.k_norm) if normed else ():
            nn.init.uniform_(norm.weight, 0.5, 1.5)

    def forward(self, x: Tensor, sees: Tensor | None = None) -> Tensor:
        q, k, v = (
            y.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for y in (self.q(x), self.k(x), self.v(x))
        )
        q, k = self.q_norm(q), self.k_norm(k)
        k, v = (y.repeat_interleave(HEADS // self.kv, dim=1) for y in (k, v))
        places = torch.arange(x.shape[1], device=x.device)
        distance = places[:, None] - places
        mask = (distance >= 0) & (distance < (self.window or x.shape[1]))
        if sees is not None:
            mask = mask & sees[:, None]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(y.transpose(1, 2).flatten(2))


class Latent(nn.Module):
    """Keys and values through a narrow layer, and a factor of keys that all heads share (as in DeepSeek-AI 2024)."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.norm, self.shared = (
            nn.Linear(WIDTH, 3),
            nn.RMSNorm(3),
            nn.Linear(WIDTH, WIDTH // HEADS),
        )
        self.q, self.wide, self.out = (
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(3, 2 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        k, v = self.wide(self.norm(self.narrow(x))).unflatten(-1, (HEADS, -1)).transpose(1, 2).chunk(2, -1)
        k = k * self.shared(x)[:, None].tanh()
        q = self.q(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.up, self.down, self.drop = (
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.Linear(2 * WIDTH, WIDTH),
            nn.Dropout(drop),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.down(self.drop(F.gelu(self.up(x)))))


class Block(nn.Module):
    """Attention and an MLP, or what is given, each with a norm before it."""

    def __init__(self, attention: nn.Module | None = None, mlp: nn.Module | None = None) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.mlp = attention or Attention(), mlp or Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class Decoder(nn.Module):
    """Learned positions, blocks, and a head, which may be tied; `loss` of (logits, labels)."""

    def __init__(
        self,
        blocks: Iterable[nn.Module],
        loss: Loss = cross_entropy,
        vocab: int = VOCAB,
        *,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(vocab, WIDTH), nn.Embedding(2 * LENGTH, WIDTH)
        self.layers, self.norm = nn.ModuleList(blocks), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.loss = loss

    def hidden(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.head(self.hidden(ids)), labels)


def decoder(
    layers: int = 1, loss: Loss = cross_entropy, vocab: int = VOCAB, *, tied: bool = False
) -> Decoder:
    torch.manual_seed(0)
    return Decoder([Block() for _ in range(layers)], loss, vocab, tied=tied)


def of_blocks(*blocks: Callable[[], nn.Module], loss: Loss = cross_entropy, tied: bool = False) -> Decoder:
    torch.manual_seed(0)
    return Decoder([block() for block in blocks], loss, tied=tied)
