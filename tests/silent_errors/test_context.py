"""Which tokens see which, where every rank has a part of them. See `docs/silent-errors.md`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoptd
from tests.silent_errors.models import (
    WIDTH,
    Attention,
    Block,
    Decoder,
    batch,
    cross_entropy,
    decoder,
    of_blocks,
)
from tests.silent_errors.pair import Pair

IDS, LABELS = batch()
GATHERED: dict[str, Any] = {"context": "all_gather"}
BY_HEADS: dict[str, Any] = {"context": "ulysses"}


@pytest.mark.parametrize("way", [GATHERED, BY_HEADS], ids=["gathered", "by heads"])
def test_windows_stay_windows(way: dict[str, Any]) -> None:
    """Fails if a layer sees all tokens before it: no window on one device, in the layer that has one."""
    with Pair(of_blocks(lambda: Block(Attention(window=3)), Block), (IDS, LABELS), c=2, **way) as pair:
        pair.train(IDS, LABELS)


class Packed(Decoder):
    """Documents one after the other in a row, which do not see each other; positions begin again in each."""

    def __init__(self) -> None:
        super().__init__([Attention(), Attention()])

    def forward(self, ids: Tensor, labels: Tensor, positions: Tensor) -> Tensor:
        documents = (positions == 0).cumsum(1)
        sees = documents[:, :, None] == documents[:, None, :]
        x = self.embed(ids) + self.positions(positions)
        for layer in self.layers:
            x = x + layer(x, sees)
        return cross_entropy(self.head(self.norm(x)), labels)


@pytest.mark.parametrize("way", [GATHERED, BY_HEADS], ids=["gathered", "by heads"])
def test_packed_documents_do_not_see_each_other(way: dict[str, Any]) -> None:
    """Fails for a causal mask alone, and for positions from the start of a part: `sees` all true on one device."""
    torch.manual_seed(0)
    places = torch.arange(8).expand(8, -1)
    start = torch.tensor([3, 5, 6, 1, 4, 2, 7, 5])[:, None]
    positions = torch.where(places < start, places, places - start)
    with Pair(Packed(), (IDS, LABELS, positions), c=2, **way) as pair:
        pair.train(IDS, LABELS, positions)


@pytest.mark.parametrize("order", ["zigzag", "contiguous"])
def test_tokens_keep_their_order(order: str) -> None:
    """Fails if values in one order are read as in the other: `ids.roll(1, 1)` on one device."""
    context = autoptd.ContextParallel("all_gather", tokens=order)
    with Pair(decoder(2), (IDS, LABELS), c=2, context=context) as pair:
        pair.train(IDS, LABELS)


class Convolution(nn.Module):
    """Each token reads the two before it, by channels."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, 1, 3) / 2)

    def forward(self, x: Tensor) -> Tensor:
        y = F.conv1d(F.pad(x.transpose(1, 2), (2, 0)), self.weight, groups=WIDTH)
        return y.transpose(1, 2)


def test_a_convolution_across_parts_of_the_context() -> None:
    """Fails if each part begins with zeros: a convolution of both halves of the tokens on one device."""
    with Pair(of_blocks(lambda: Block(Convolution())), (IDS, LABELS), c=2) as pair:
        pair.train(IDS, LABELS)


def test_rows_of_a_batch_stay_apart_by_heads() -> None:
    """Fails if an all-to-all mixes rows: `ids` of the second row in the first on one device."""
    with Pair(decoder(), (IDS, LABELS), c=2, num_microbatches=1, **BY_HEADS) as pair:
        pair.train(IDS, LABELS)


def test_tokens_that_context_ranks_do_not_divide_are_refused() -> None:
    """Fails if nothing is raised: seven tokens over two ranks would leave one out, or pad."""
    with pytest.raises(autoptd.PlanError, match="7"):
        Pair(decoder(), (IDS[:, :7], LABELS[:, :7]), c=2)
