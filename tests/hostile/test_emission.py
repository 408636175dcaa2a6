"""What emitted files spell: numbers of layers, names of the user's that they use themselves, views to scalars."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.hostile.against_torch import assert_parity

VOCAB, WIDTH = 32, 16


def ids_and_labels(seed: int) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(seed)
    ids, labels = (torch.randint(0, VOCAB, (8, 6), generator=source) for _ in range(2))
    return ids, labels


class Layers(nn.Module):
    """A stack whose residuals are put together by `join(h, layer(h), i)`."""

    def __init__(self, join: Callable[[Tensor, Tensor, int], Tensor], depth: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.join, self.emb, self.head = join, nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(depth)
        )

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        h = self.emb(ids)
        for i, layer in enumerate(self.layers):
            h = self.join(h, layer(h), i)
        return F.cross_entropy(self.head(h).flatten(0, 1), labels.flatten())


JOINS: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "times i + 1": lambda h, y, i: h + y * (i + 1),
    "i + 1 times": lambda h, y, i: h + (i + 1) * y,
    "minus i + 1": lambda h, y, i: h + (y - (i + 1)),
    "i + 1 minus": lambda h, y, i: h + ((i + 1) - y),
    "over i + 1": lambda h, y, i: h + y / (i + 1),
    "i + 1 over": lambda h, y, i: h + (i + 1) / (y + 9),
    "to the i + 1": lambda h, y, i: h + y.sigmoid() ** (i + 1),
    "i + 2 to the": lambda h, y, i: h + (i + 2) ** y,
    "minus i - 2 to the": lambda h, y, i: h + y * (i - 2) + (-1) ** i * y,
    "2 i + 1 times": lambda h, y, i: h + (2 * i + 1) * y,
    "falling": lambda h, y, i: h + y * (3 - i) - (1 - i),
    "over and times": lambda h, y, i: (h + y).div(10 + i).tanh() * (10 + i),
    "alpha": lambda h, y, i: torch.add(h, y, alpha=i + 1),
    "slices": lambda h, y, i: (
        h + F.pad(y[..., i + 1 :], (i + 1, 0)) + F.pad(y[..., : 2 * i + 3], (0, 13 - 2 * i))
    ),
    "rolled": lambda h, y, i: h + y.roll(i + 1, -1) * (i + 1),
    "comparison": lambda h, y, i: h + y * (y > i - 1),
    "clamped": lambda h, y, i: h + y.clamp(-(i + 1), i + 1) * (i - 1),
    "mixed": lambda h, y, i: h + y * (i + 1 if i % 2 else 0.5),
    "floats": lambda h, y, i: h - y / (i + 1.0) * (i - 1.5),
    "mean of a part": lambda h, y, i: h + y[..., : 2 * i + 2].mean(-1, keepdim=True) * (i + 1),
}


@pytest.mark.one_in(24)
@pytest.mark.parametrize(
    ("mesh", "name"),
    list(itertools.product([{"t": 2, "p": 2, "d": 2, "num_microbatches": 2}, {}], JOINS)),
)
def test_numbers_of_layers(mesh: dict[str, Any], name: str) -> None:
    assert_parity(Layers(JOINS[name]), [ids_and_labels(0), ids_and_labels(1)], **mesh)


CLASHING = "w input b class tp lambda F w_ rt x i loss self layer torch µ math sum range".split()


class Named(nn.Module):
    """One parameter and one buffer of a given name, viewed, converted, and used plainly."""

    def __init__(self, name: str, repeated: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.called, self.emb = name, nn.Embedding(VOCAB, WIDTH)
        self.register_parameter(name, nn.Parameter(torch.randn(1, 1, WIDTH)))
        self.repeated = repeated
        self.own = nn.ModuleList(self.holder(name) for _ in range(3))
        self.shared = self.holder(name)
        self.out = nn.Linear(WIDTH, VOCAB)

    def holder(self, name: str) -> nn.Module:
        made = nn.Module()
        made.register_parameter(name, nn.Parameter(torch.randn(1, 1, WIDTH)))
        made.register_buffer(f"{name}2", torch.randn(WIDTH))
        made.add_module("linear", nn.Linear(WIDTH, WIDTH))
        made.linear.register_parameter(name, nn.Parameter(torch.randn(1, WIDTH)))
        return made

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        h = self.emb(ids)
        for one in self.own if self.repeated else self.own[:1]:
            h = (
                h
                + torch.tanh(
                    one.linear(h * getattr(one, self.called).expand_as(h))
                    * getattr(one, f"{self.called}2").view(1, WIDTH)
                )
                * 0.5
            )
            h = h + getattr(one.linear, self.called).view(WIDTH).expand_as(h) * getattr(
                self.shared, self.called
            ).view(1, WIDTH)
        h = h * getattr(self, self.called).expand_as(h)
        h = h.masked_fill(h > 5, float("-inf")).clamp(min=-9)
        return F.cross_entropy(self.out(h).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("name", CLASHING)
@pytest.mark.parametrize("repeated", [False, True])
def test_a_parameter_may_have_any_name(name: str, repeated: bool) -> None:
    mesh = {"t": 2, "p": 2, "num_microbatches": 2} if repeated else {"d": 2}
    assert_parity(Named(name, repeated), [ids_and_labels(0)], **mesh)
