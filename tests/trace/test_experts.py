"""Experts whose tokens are sorted become one product a row; what is no such thing stays as it is, and is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoptd
from autoptd import trace
from autoptd.ir.expert_mm import NAME, expert_mm
from autoptd.ir.notes import op_name, ops

TOKENS, WIDTH, OUT, EXPERTS, CHOICES = 8, 16, 8, 3, 2
X = torch.randn(TOKENS, WIDTH)
Dispatch = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def ends_of(ids: Tensor) -> Tensor:
    return torch.histc(ids.float(), EXPERTS, 0, EXPERTS - 1).cumsum(0, dtype=torch.int32)


class Mixture(nn.Module):
    """`dispatch` gets the tokens, the experts' numbers and weights of each token's choices, and the matrices."""

    def __init__(self, dispatch: Dispatch) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.matrices = nn.Parameter(torch.randn(EXPERTS, WIDTH, OUT))
        self.dispatch = dispatch

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(CHOICES)
        y = self.dispatch(x, chosen, weights, self.matrices)
        return (y * torch.arange(OUT)).square().mean()


def by_argsort(x: Tensor, chosen: Tensor, weights: Tensor, matrices: Tensor) -> Tensor:
    ids, order = chosen.flatten().sort()
    y = F.grouped_mm(x[order // CHOICES], matrices, offs=ends_of(ids))
    y = F.gelu(y) * weights.flatten()[order, None]
    return y[order.argsort()].view(-1, CHOICES, OUT).sum(1)


def by_index_put(x: Tensor, chosen: Tensor, weights: Tensor, matrices: Tensor) -> Tensor:
    order = chosen.reshape(-1).argsort(stable=True)
    ends = F.one_hot(chosen.flatten(), EXPERTS).sum(0).cumsum(0).to(torch.int32)
    y = F.grouped_mm(x.index_select(0, order.div(CHOICES, rounding_mode="floor")), matrices, offs=ends)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order))
    return (y[back] * weights.reshape(-1, 1)).view(-1, CHOICES, OUT).sum(1)


def by_index_add(x: Tensor, chosen: Tensor, weights: Tensor, matrices: Tensor) -> Tensor:
    order = chosen.flatten().argsort()
    ids, tokens = chosen.flatten()[order], order // CHOICES
    y = F.grouped_mm(x[tokens], matrices, offs=ends_of(ids)) * weights.flatten()[order].unsqueeze(-1)
    return torch.zeros(len(x), OUT).index_add(0, tokens, y)


def one_choice(x: Tensor, chosen: Tensor, weights: Tensor, matrices: Tensor) -> Tensor:
    ids, order = chosen[:, 0].sort(stable=True)
    return F.grouped_mm(x[order], matrices, offs=ends_of(ids))[order.argsort()] * weights[:, :1]


def captured(dispatch: Dispatch) -> list[str]:
    model = Mixture(dispatch)
    found = trace.capture(model, (X,), {}, None)
    trace.compare(model, None, found.graph, found.buffers, (X,), {})
    return [op_name(node) for node in ops(found.graph)]


@pytest.mark.parametrize("dispatch", [by_argsort, by_index_put, by_index_add, one_choice])
def test_a_sort_that_is_undone_goes(dispatch: Dispatch) -> None:
    names = captured(dispatch)
    assert NAME in names and not {"aten.sort", "aten.histc", "aten.bincount", "aten.cumsum"} & {*names}


def reads_place(x: Tensor, chosen: Tensor, weights: Tensor, matrices: Tensor) -> Tensor:
    """The place in the sorted rows is a number that is used."""
    ids, order = chosen.flatten().sort()
    y = F.grouped_mm(x[order // CHOICES], matrices, offs=ends_of(ids))
    y = y * torch.arange(len(order))[:, None]
    return y[order.argsort()].view(-1, CHOICES, OUT).sum(1)


def reads_neighbours(x: Tensor, chosen: Tensor, weights: Tensor, matrices: Tensor) -> Tensor:
    ids, order = chosen.flatten().sort()
    y = F.grouped_mm(x[order // CHOICES], matrices, offs=ends_of(ids)).cumsum(0)
    return y[order.argsort()].view(-1, CHOICES, OUT).sum(1)


def not_undone(x: Tensor, chosen: Tensor, weights: Tensor, matrices: Tensor) -> Tensor:
    ids, order = chosen.flatten().sort()
    y = F.grouped_mm(x[order // CHOICES], matrices, offs=ends_of(ids))
    return y[order].view(-1, CHOICES, OUT).sum(1)


def other_ends(x: Tensor, chosen: Tensor, weights: Tensor, matrices: Tensor) -> Tensor:
    """The groups are not those of the sort."""
    ids, order = chosen.flatten().sort()
    ends = (torch.arange(1, 4) * len(ids) // 3).to(torch.int32)
    y = F.grouped_mm(x[order // CHOICES], matrices, offs=ends)
    return y[order.argsort()].view(-1, CHOICES, OUT).sum(1)


def fewer_bins(x: Tensor, chosen: Tensor, weights: Tensor, matrices: Tensor) -> Tensor:
    """Bins of one and a half experts."""
    ids, order = chosen.flatten().sort()
    ends = torch.histc(ids.float(), EXPERTS, 0, EXPERTS).cumsum(0, dtype=torch.int32)
    y = F.grouped_mm(x[order // CHOICES], matrices, offs=ends)
    return y[order.argsort()].view(-1, CHOICES, OUT).sum(1)


def adds_to_some(x: Tensor, chosen: Tensor, weights: Tensor, matrices: Tensor) -> Tensor:
    """What it adds to is not zero."""
    ids, order = chosen.flatten().sort()
    y = F.grouped_mm(x[order // CHOICES], matrices, offs=ends_of(ids))
    return torch.ones(len(x), OUT).index_add(0, order // CHOICES, y)


def unsorted_beside(x: Tensor, chosen: Tensor, weights: Tensor, matrices: Tensor) -> Tensor:
    """Weights in the order of the tokens meet rows in that of the experts."""
    ids, order = chosen.flatten().sort()
    y = F.grouped_mm(x[order // CHOICES], matrices, offs=ends_of(ids)) * weights.reshape(-1, 1)
    return y[order.argsort()].view(-1, CHOICES, OUT).sum(1)


def descending(x: Tensor, chosen: Tensor, weights: Tensor, matrices: Tensor) -> Tensor:
    ids, order = chosen.flatten().sort(descending=True)
    y = F.grouped_mm(x[order // CHOICES], matrices, offs=ends_of(ids))
    return y[order.argsort()].view(-1, CHOICES, OUT).sum(1)


OTHERS = [
    reads_place,
    reads_neighbours,
    not_undone,
    other_ends,
    fewer_bins,
    adds_to_some,
    unsorted_beside,
    descending,
]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dispatch", OTHERS)
def test_what_depends_on_the_order_stays_and_is_refused_over_the_batch(dispatch: Dispatch) -> None:
    assert NAME not in captured(dispatch)
    with pytest.raises(autoptd.PlanError, match="mixes the samples"):
        autoptd.compile(Mixture(dispatch), d=2, example_inputs=(X,))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("count", [0, 1, 7])
def test_a_product_of_rows_is_that_of_their_experts_matrices(dtype: torch.dtype, count: int) -> None:
    """Beside matrices gathered by row; the last expert is chosen by none, and its gradient is zero."""
    torch.manual_seed(count)
    x = torch.randn(count, 5, dtype=dtype, requires_grad=True)
    weight = torch.randn(4, 5, 3, dtype=dtype, requires_grad=True)
    ids = torch.randint(3, (count,))
    found, wanted = expert_mm(x, weight, ids), torch.bmm(x[:, None], weight[ids])[:, 0]
    torch.testing.assert_close(found, wanted)
    way = torch.randn_like(wanted)
    for mine, other in zip(
        torch.autograd.grad(found, (x, weight), way),
        torch.autograd.grad(wanted, (x, weight), way),
        strict=True,
    ):
        torch.testing.assert_close(mine, other)


def test_a_frozen_matrix_has_no_gradient() -> None:
    x, weight, ids = torch.randn(6, 5, requires_grad=True), torch.randn(4, 5, 3), torch.randint(4, (6,))
    expert_mm(x, weight, ids).sum().backward()
    assert x.grad is not None and weight.grad is None


def test_fakes_have_the_shape() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        args: Any = (torch.empty(6, 5), torch.empty(4, 5, 3), torch.empty(6, dtype=torch.long))
        assert expert_mm(*args).shape == (6, 3)
