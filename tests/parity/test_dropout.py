"""Dropout: any layout trains as the unmodified model does that drops the same elements, in float64."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoptd
from tests.parity.models import LENGTH, VOCAB, batch, dropping_gpt, uneven

MESHES = [(1, 1, 1, 1), (1, 2, 1, 2), (2, 2, 2, 1), (4, 2, 1, 2)]


@pytest.mark.parametrize(("t", "p", "d", "v"), MESHES)
def test_gpt(t: int, p: int, d: int, v: int) -> None:
    program = autoptd.compile(dropping_gpt(), t=t, p=p, d=d, v=v, example_inputs=batch())
    assert [one.site for one in program.dropouts] == list(range(13))
    assert {one.batch for one in program.dropouts} == {(0, 1)}
    autoptd.verify(dropping_gpt(), t=t, p=p, d=d, v=v, example_inputs=batch(), steps=2)


class Styles(nn.Module):
    """The ways in which decoders call dropout; every one is a residual branch of its own."""

    def __init__(self, style: Callable[[Styles, Tensor], Tensor], width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.style, self.heads = style, heads
        self.embed, self.positions = nn.Embedding(VOCAB, width), nn.Parameter(torch.randn(LENGTH, width))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.bias = nn.Parameter(torch.randn(heads, LENGTH, LENGTH))
        self.drop, self.in_place = nn.Dropout(0.2), nn.Dropout(0.2, inplace=True)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids) + self.positions
        x = x + self.style(self, x)
        logits = x @ self.embed.weight.T
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def heads_of(self, x: Tensor) -> list[Tensor]:
        """q, k, v [b, heads, s, k]."""
        return [y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1)]

    def join(self, y: Tensor) -> Tensor:
        return self.out(y.transpose(1, 2).flatten(2))


def attend(self: Styles, x: Tensor, **keywords: Any) -> Tensor:
    q, k, v = self.heads_of(x)
    return self.join(F.scaled_dot_product_attention(q, k, v, dropout_p=0.2, **keywords))


def written_out(self: Styles, x: Tensor) -> Tensor:
    q, k, v = self.heads_of(x)
    scores = (q @ k.transpose(-2, -1) / 2).masked_fill(
        torch.ones(LENGTH, LENGTH).triu(1).bool(), float("-inf")
    )
    return self.join(self.drop(scores.softmax(-1)) @ v)


def batch_and_heads_folded(self: Styles, x: Tensor) -> Tensor:
    q, k, v = (y.reshape(-1, LENGTH, y.shape[-1]) for y in self.heads_of(x))
    probabilities = self.drop(torch.bmm(q, k.transpose(1, 2)).softmax(-1))
    return self.join(torch.bmm(probabilities, v).unflatten(0, (-1, self.heads)))


def tokens_folded(self: Styles, x: Tensor) -> Tensor:
    b, s, h = x.shape
    hidden = self.drop(F.gelu(self.up(x.view(b * s, h))))
    return self.drop(self.down(hidden)).view(b, s, h)


def sequence_first(self: Styles, x: Tensor) -> Tensor:
    hidden = self.drop(F.gelu(self.up(x.transpose(0, 1))))
    return self.drop(self.down(hidden)).transpose(0, 1)


def heads_before_batch(self: Styles, x: Tensor) -> Tensor:
    """[heads * batch, s, k] and [s, heads, k, batch]: the batch is the minor factor of a split dim, or the last one."""
    q, k, v = (y.transpose(0, 1).reshape(-1, LENGTH, y.shape[-1]) for y in self.heads_of(x))
    last = self.drop(v.unflatten(0, (self.heads, -1)).permute(2, 0, 3, 1))
    v = last.permute(1, 3, 0, 2) + self.drop(v).unflatten(0, (self.heads, -1))
    probabilities = self.drop(torch.bmm(q, k.transpose(1, 2)).softmax(-1)).unflatten(0, (self.heads, -1))
    return self.join((probabilities @ v).transpose(0, 1))


def grouped(self: Styles, x: Tensor) -> Tensor:
    q, k, v = self.heads_of(x)
    keywords: dict[str, Any] = {"is_causal": True, "enable_gqa": True, "dropout_p": 0.2, "scale": 0.3}
    return self.join(F.scaled_dot_product_attention(q, k[:, :2], v[:, :2], **keywords))


def in_place(self: Styles, x: Tensor) -> Tensor:
    hidden = self.up(x)
    F.dropout(hidden, 0.3, True, inplace=True)
    hidden = self.in_place(F.gelu(hidden))
    hidden += 1
    return self.down(hidden)


def parameters_dropped(self: Styles, x: Tensor) -> Tensor:
    """No batch in it: one mask for all rows."""
    return F.linear(x + self.drop(self.positions), self.drop(self.out.weight), self.out.bias)


def constants_dropped(self: Styles, x: Tensor) -> Tensor:
    """One entry per row, and yet not from the batch."""
    return x * self.drop(torch.ones(x.shape[0], LENGTH, 1, dtype=x.dtype))


def shared_and_dead(self: Styles, x: Tensor) -> Tensor:
    """The same module twice, a result that nobody reads, and shares of 0 and 1, which draw nothing."""
    y = self.drop(self.up(x))
    self.drop(x)
    F.dropout(x, 0.0)
    y = y + F.dropout(y, 1.0) + self.drop(F.gelu(y))
    return self.drop(self.down(y))


def masked(kind: str) -> Callable[[Styles, Tensor], Tensor]:
    def style(self: Styles, x: Tensor) -> Tensor:
        causal = torch.ones(LENGTH, LENGTH).tril().bool()
        if kind == "bool":
            some = causal & (torch.arange(LENGTH) != 3)[:, None]  # the fourth query has no key at all
            return attend(self, x, attn_mask=some)
        return attend(
            self,
            x,
            attn_mask=self.bias.masked_fill(~causal, float("-inf")) if kind == "bias" else self.bias[0],
        )

    return style


STYLES: dict[str, Callable[[Styles, Tensor], Tensor]] = {
    one.__name__: one
    for one in [
        written_out,
        batch_and_heads_folded,
        tokens_folded,
        sequence_first,
        heads_before_batch,
        grouped,
        in_place,
        parameters_dropped,
        constants_dropped,
        shared_and_dead,
        attend,
    ]
}
STYLES |= {f"mask of {kind}": masked(kind) for kind in ("bool", "bias", "float")}


STYLE_MESHES = [{"t": 2, "d": 2}, {"num_microbatches": 1}, {"t": 2, "num_microbatches": 4}]


def styled(name: str) -> Styles:
    torch.manual_seed(0)
    return Styles(STYLES[name])


@pytest.mark.thorough
@pytest.mark.one_in(42)
@pytest.mark.parametrize(("name", "mesh"), list(itertools.product(STYLES, STYLE_MESHES)))
def test_styles(name: str, mesh: dict[str, int]) -> None:
    ids, targets = batch()
    autoptd.verify(styled(name), **mesh, example_inputs=(ids, uneven(targets)), steps=3)
