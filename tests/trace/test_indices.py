"""Indices that count from zero become views or gathers, all others stay, and the values are the model's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autoptd import trace
from autoptd.ir.notes import op_name, ops

X = torch.randn(4, 6)


class Indexed(nn.Module):
    def __init__(self, index: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.index = nn.Linear(6, 6), index

    def forward(self, x: Tensor) -> Tensor:
        y = self.index(self.layer(x))
        return (y * torch.arange(y.numel()).view(y.shape)).sum()


def names_of(index: Callable[[Tensor], Tensor]) -> list[str]:
    torch.manual_seed(0)
    model = Indexed(index)
    found = trace.capture(model, (X,), {}, None)
    trace.compare(model, None, found.graph, found.buffers, (X,), {})
    return [op_name(node) for node in ops(found.graph)]


@pytest.mark.parametrize(
    "index",
    [
        lambda y: y[torch.arange(4)[:, None], torch.arange(6)],
        lambda y: y[torch.arange(4)[:, None, None, None], torch.arange(6) + 0],
        lambda y: y[torch.arange(4), torch.arange(6)[:, None]],  # transposed
        lambda y: y[:1][torch.arange(1)[:, None], torch.arange(6)],
        lambda y: y[torch.arange(y.shape[0])[:, None], torch.arange(1, 7)[None] - 1],
        lambda y: y[torch.arange(4)],
        lambda y: y[torch.arange(4), -1],
    ],
)
def test_an_index_that_counts_is_a_view(index: Callable[[Tensor], Tensor]) -> None:
    assert "aten.index" not in names_of(index)


LAST = torch.tensor([3, -1, 0, 5])


@pytest.mark.parametrize(
    "index",
    [
        lambda y: y[torch.arange(4), torch.arange(4)],  # a diagonal
        lambda y: y[torch.arange(4)[:, None], torch.arange(5)],
        lambda y: y[torch.arange(4)[:, None], torch.arange(5, -1, -1)],
        lambda y: y[torch.arange(4)[:, None], torch.arange(6) // 2],
        lambda y: y[torch.arange(4), LAST],
        lambda y: y[torch.arange(4), LAST.int()],
        lambda y: y.t()[LAST, torch.arange(4)],
        lambda y: y[torch.arange(4)[:, None], torch.stack([LAST, LAST - 1], 1)],
        lambda y: y.view(4, 3, 2)[torch.arange(4), LAST.clamp(0, 2)],
        lambda y: y.view(4, 3, 2)[torch.arange(4)[:, None], torch.arange(3), LAST[:, None].clamp(-1, 1)],
        lambda y: y.view(2, 2, 3, 2)[torch.arange(2)[:, None], LAST[:2, None].clamp(0, 1), torch.arange(3)],
        lambda y: y.view(4, 6, 1)[torch.arange(4)[:, None, None], LAST.view(1, 2, 2)],
    ],
)
def test_an_index_of_which_all_but_one_count_is_a_gather(index: Callable[[Tensor], Tensor]) -> None:
    names = names_of(index)
    assert "aten.gather" in names and "aten.index" not in names


@pytest.mark.parametrize(
    "index",
    [
        lambda y: y[:, :4][torch.arange(4), torch.arange(4)],  # a diagonal
        lambda y: y[torch.arange(2)[:, None].repeat(2, 1), torch.arange(6)],
        lambda y: y[LAST.clamp(0, 3), LAST],
        lambda y: y[LAST.clamp(0, 3)],
        lambda y: y.view(4, 3, 2)[torch.arange(4), :, LAST.clamp(0, 1)],
    ],
)
def test_other_indices_stay(index: Callable[[Tensor], Tensor]) -> None:
    assert "aten.index" in names_of(index)


def test_broadcast_to_is_expand() -> None:
    assert "aten.expand" in names_of(lambda y: y[:, None].broadcast_to(4, 3, 6))
