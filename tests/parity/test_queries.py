"""Heads that t does not divide: tensor ranks split attention by its queries, where that pays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoptd
from autoptd.ir import machine
from tests.parity.models import VOCAB, Separate, batch, gpt
from tests.parity.rotary import llama
from tests.parity.test_context import Shifted

IDS, TARGETS = batch()


@pytest.fixture(autouse=True, scope="module")
def products_are_slow() -> Iterator[None]:
    """As beside long sequences: what all ranks compute costs more than what they send."""
    slow = machine.Machine(latency=1e-9, per_saved_byte=1e-12, flops=1e9)
    with mock.patch.object(machine, "DEFAULT", slow):
        yield


class Cross(nn.Module):
    """Eight queries of a learned table, and keys of the tokens: no token of a query is one of the input."""

    def __init__(self, width: int = 36, heads: int = 6) -> None:
        super().__init__()
        self.embed, self.queries = nn.Embedding(VOCAB, width), nn.Parameter(torch.randn(8, width))
        self.kv, self.out, self.heads = nn.Linear(width, 2 * width), nn.Linear(width, VOCAB), heads

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        k, v = (
            y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.kv(self.embed(ids)).chunk(2, -1)
        )
        q = self.queries.unflatten(-1, (self.heads, -1)).transpose(0, 1).expand(len(ids), -1, -1, -1)
        z = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return F.cross_entropy(self.out(z).flatten(0, 1), labels.flatten())


class Blocks(nn.Module):
    """Tokens see those before them in a block of four: attention has a dim for the blocks, which are tokens, too."""

    def __init__(self, width: int = 30, heads: int = 5) -> None:
        super().__init__()
        self.embed, self.qkv = nn.Embedding(VOCAB, width), nn.Linear(width, 3 * width)
        self.out, self.head, self.heads = nn.Linear(width, width), nn.Linear(width, VOCAB), heads

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        q, k, v = (
            y.unflatten(-1, (self.heads, -1)).transpose(1, 2).unflatten(2, (-1, 4))
            for y in self.qkv(x).chunk(3, -1)
        )
        near = torch.ones(4, 4, dtype=torch.bool, device=ids.device).tril().triu(-1)
        z = F.scaled_dot_product_attention(q, k, v, attn_mask=near).flatten(2, 3)
        x = x + self.out(z.transpose(1, 2).flatten(2))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def made(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "causal": lambda: gpt(2, heads=6, width=36),
    "written out": lambda: made(lambda: Separate(2, width=36, heads=6)),
    "masked": lambda: made(lambda: Shifted(36, 6)),
    "rotary": lambda: llama(2, width=48, heads=6, kv=6),
    "queries of a table": lambda: made(Cross),
}
MESHES: list[dict[str, Any]] = [
    {"t": 4},
    {"t": 4, "sequence_parallel": True},
    {"t": 4, "d": 2, "zero": 1, "sequence_parallel": "auto"},
    {"t": 4, "p": 2},
    {"t": 4, "recompute": "full"},
]


@pytest.mark.parametrize("mesh", MESHES, ids=map(str, MESHES))
@pytest.mark.parametrize("name", MODELS)
def test_parity(name: str, mesh: dict[str, Any]) -> None:
    program = autoptd.compile(model := MODELS[name](), **mesh, example_inputs=(IDS, TARGETS))
    files = "".join(program.sources.values())
    because = "" if name == "queries of a table" else ", because 6 heads do not divide over t=4"
    assert f"split by queries: 8 = 4 x 2{because}\n" in files
    autoptd.verify(model, **mesh, example_inputs=(IDS, TARGETS), steps=2)


@pytest.mark.thorough
@pytest.mark.parametrize("name", MODELS)
def test_beside_ranks_that_divide_tokens(name: str) -> None:
    """Of causal attention one axis has the queries, of any other both may."""
    autoptd.verify(MODELS[name](), t=4, c=2, example_inputs=(IDS, TARGETS), steps=2)


@pytest.mark.parametrize("asked", ["auto", True, False])
def test_blocks_of_tokens(asked: bool | str) -> None:
    """Their queries are split or not, whether or not sequence parallelism may split the blocks."""
    long = tuple(torch.cat([x, x.roll(1, 0)], 1) for x in (IDS, TARGETS))
    autoptd.verify(made(Blocks), t=2, sequence_parallel=asked, example_inputs=long, steps=2)


def test_causal_queries_are_as_much_work_for_every_rank() -> None:
    program = autoptd.compile(gpt(2, heads=6, width=36), t=4, example_inputs=(IDS, TARGETS))
    assert 'rt.causal_attention(q, k, v, tp, order="zigzag")' in program.sources["stage_0.py"]
