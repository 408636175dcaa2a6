"""Rows by expert: every rank's own rows, put back, add up to the products of all rows, and so do their gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from autoptd import runtime as rt
from autoptd.ir.mesh import Mesh
from autoptd.runtime.world.threads import ThreadWorld, run_ranks
from autoptd.runtime.world.world import Communicators, World

EXPERTS, WIDTH, OUT, CHOICES = 4, 5, 3, 2
TOKENS = 6
# Of every token's choices; all on one expert leaves the other ranks without a row.
IDS = {
    "mixed": [0, 3, 2, 1, 3, 2, 0, 1, 1, 3, 2, 0],
    "one rank has none": [0, 1, 1, 0, 0, 1, 1, 0, 0, 1, 1, 0],
    "all on one expert": [3] * 12,
}


def layer(x: Tensor, weight: Tensor, bias: Tensor, ids: Tensor, group: Any) -> Tensor:
    order, ends = rt.by_expert(ids, EXPERTS, group)
    rows = rt.grouped_mm(rt.take_rows(x, order, CHOICES), weight, ends) + rt.expert_rows(bias, order, ends)
    # Neither 0 nor finite where an empty row would be 0.
    return rt.put_rows(rows.log1p() / rows + 1, order, len(ids))


def by_row(x: Tensor, weight: Tensor, bias: Tensor, ids: Tensor) -> Tensor:
    repeated = x.repeat_interleave(CHOICES, 0)
    rows = torch.bmm(repeated[:, None], weight[ids])[:, 0] + bias[ids]
    return rows.log1p() / rows + 1


def operands() -> list[Tensor]:
    torch.manual_seed(0)
    made = torch.rand(TOKENS, WIDTH), torch.rand(EXPERTS, WIDTH, OUT), torch.rand(EXPERTS, OUT)
    return [x.double() for x in made]


@pytest.mark.parametrize("t", [1, 2, 4])
@pytest.mark.parametrize("case", IDS)
def test_own_rows_add_up(case: str, t: int) -> None:
    ids, each = torch.tensor(IDS[case]), EXPERTS // t
    cotangent = torch.randn(len(ids), OUT, dtype=torch.float64)
    whole = [x.requires_grad_() for x in operands()]
    wanted = by_row(*whole, ids)
    wanted.backward(cotangent)

    def body(world: World) -> list[Tensor]:
        group = world.group(("tp",))
        mine = slice(group.index * each, (group.index + 1) * each)
        x, weight, bias = (part.detach().clone() for part in whole)
        own = [x.requires_grad_(), weight[mine].requires_grad_(), bias[mine].requires_grad_()]
        y = layer(*own, ids, group)
        y.backward(cotangent)
        return [y.detach(), *(part.grad for part in own if part.grad is not None)]

    results = run_ranks(ThreadWorld(Mesh(t=t), Communicators(), timeout=20.0), body)
    values, of_x, of_weight, of_bias = zip(*results, strict=True)
    found = [sum(values), sum(of_x), torch.cat(of_weight), torch.cat(of_bias)]
    for one, other in zip(found, [wanted, *(x.grad for x in whole)], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_what_others_have_is_not_read() -> None:
    """NaN in the tokens, and in the matrices, of which this rank's experts know nothing."""
    ids = torch.tensor([0, 3, 3, 0])
    x = torch.ones(4, WIDTH)
    x[1:3] = float("nan")
    x.requires_grad_()
    weight = torch.ones(EXPERTS, WIDTH, OUT)
    weight[1] = float("inf")

    def body(world: World) -> tuple[Tensor, Tensor]:
        group = world.group(("tp",))
        order, ends = rt.by_expert(ids, EXPERTS, group)
        own = weight[2 * group.index : 2 * group.index + 2]
        y = rt.put_rows(rt.grouped_mm(rt.take_rows(x, order), own, ends), order, 4)
        (of_x,) = torch.autograd.grad(y.sum(), x)
        return y.detach(), of_x

    (y, of_x), _ = run_ranks(ThreadWorld(Mesh(t=2), Communicators(), timeout=20.0), body)
    assert torch.equal(y, torch.tensor([5.0, 0, 0, 5])[:, None].expand(4, OUT))
    assert torch.equal(of_x, torch.tensor([3.0, 0, 0, 3])[:, None].expand(4, WIDTH))


def test_a_frozen_matrix_has_no_gradient() -> None:
    x, weight = torch.randn(6, WIDTH, requires_grad=True), torch.randn(EXPERTS, WIDTH, OUT)
    order, ends = rt.by_expert(torch.randint(EXPERTS, (6,)), EXPERTS)
    rt.grouped_mm(rt.take_rows(x, order), weight, ends).sum().backward()
    assert x.grad is not None and weight.grad is None
