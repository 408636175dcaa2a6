"""What depends on the order of tokens, between attention in zigzag order: it gets them in order, or there is one error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoptd
from tests.parity.models import VOCAB

LENGTH, WIDTH, HEADS = 16, 16, 4


class Between(nn.Module):
    """Causal attention, and behind it an operator on [b, s, width]."""

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.near = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.before = nn.Conv1d(WIDTH, WIDTH, 3, groups=WIDTH)
        self.pairs = nn.Conv1d(WIDTH, WIDTH, 2, stride=2)
        self.scan = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.name = name

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.out(self.attend(x))
        x = x + BETWEEN[self.name](self, x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(-3, -2) for y in self.qkv(x).chunk(3, -1))
        z = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return z.transpose(-3, -2).flatten(-2)


def behind(x: Tensor) -> Tensor:
    """Every token one place later."""
    return F.pad(x[:, :-1], (0, 0, 1, 0))


def backwards(x: Tensor) -> Tensor:
    """Places [b, s, width] of tokens, the last one first."""
    return torch.arange(LENGTH).flip(0)[None, :, None].expand(x.shape)


BETWEEN: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "convolution": lambda m, x: m.near(x.transpose(1, 2)).transpose(1, 2),
    "causal convolution": lambda m, x: m.before(F.pad(x.transpose(1, 2), (2, 0))).transpose(1, 2),
    "convolution of pairs": lambda m, x: (
        m.pairs(x.transpose(1, 2)).repeat_interleave(2, -1).transpose(1, 2)
    ),
    "cumsum": lambda m, x: x.cumsum(1),
    "logcumsumexp": lambda m, x: x.logcumsumexp(1),
    "recurrence": lambda m, x: m.scan(x)[0],
    "flip": lambda m, x: x.flip(1),
    "roll": lambda m, x: x.roll(1, 1),
    "shift": lambda m, x: behind(x),
    "differences": lambda m, x: x - behind(x),
    "every second token": lambda m, x: x[:, ::2].repeat_interleave(2, 1),
    "halves change places": lambda m, x: torch.cat((x[:, LENGTH // 2 :], x[:, : LENGTH // 2]), 1),
    "the sum of halves": lambda m, x: (x[:, : LENGTH // 2] + x[:, LENGTH // 2 :]).repeat(1, 2, 1),
    "attention in windows": lambda m, x: m.attend(x.unflatten(1, (-1, 4))).flatten(1, 2),
    "attention in halves": lambda m, x: torch.cat([m.attend(half) for half in x.chunk(2, 1)], 1),
    "attention in unequal parts": lambda m, x: torch.cat([m.attend(part) for part in x.split([4, 12], 1)], 1),
    "unequal parts change places": lambda m, x: torch.cat(x.split([4, 12], 1)[::-1], 1),
    "means of windows": lambda m, x: F.pad(x, (0, 0, 2, 0)).unfold(1, 3, 1).mean(-1),
    "pooling": lambda m, x: F.avg_pool1d(x.transpose(1, 2), 2).repeat_interleave(2, -1).transpose(1, 2),
    "an index": lambda m, x: x[:, torch.arange(LENGTH - 1, -1, -1)],
    "gather": lambda m, x: x.gather(1, backwards(x)),
    "scatter": lambda m, x: torch.zeros_like(x).scatter(1, backwards(x), x),
    "sort": lambda m, x: x.sort(1).values,
    "the first token": lambda m, x: x + x[:, :1],
    "the last token": lambda m, x: x + x[:, -1:],
    "a triangle": lambda m, x: torch.ones(LENGTH, LENGTH, dtype=x.dtype).tril() @ x,
    "a mean of earlier ones": lambda m, x: x.cumsum(1) / torch.arange(1, LENGTH + 1)[:, None],
    "softmax over tokens": lambda m, x: x.softmax(1),
    "the place of the largest": lambda m, x: x + x.argmax(1, keepdim=True),
    "tokens as a matrix": lambda m, x: x.unflatten(1, (4, -1)).transpose(1, 2).reshape(x.shape),
}  # fmt: skip
IDS, LABELS = (torch.randint(VOCAB, (8, LENGTH), generator=torch.manual_seed(seed)) for seed in (0, 1))
GIVEN: dict[str, Any] = {"token_order": "zigzag", "example_inputs": (IDS, LABELS), "steps": 1}


@pytest.mark.one_in(24)
@pytest.mark.parametrize("name", BETWEEN, ids=BETWEEN)
def test_what_needs_tokens_in_order_has_them(name: str) -> None:
    autoptd.verify(Between(name), c=2, context="all_gather", **GIVEN)


@pytest.mark.thorough
@pytest.mark.parametrize("name", BETWEEN)
@pytest.mark.parametrize("mesh", [{"c": 4}, {"c": 2, "t": 2, "sequence_parallel": True}], ids=str)
def test_it_is_right_on_any_mesh_or_refused(name: str, mesh: dict[str, Any]) -> None:
    try:
        autoptd.verify(Between(name), **mesh, **GIVEN)
    except autoptd.PlanError as error:
        # Halves, windows and pairs may be too few tokens for two pieces on every rank.
        assert "tokens do not divide" in str(error)
