"""Samples are never mixed silently: what is refused with more than one microbatch, and what is allowed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autoptd.errors import AutoptdError, InternalError, PlanError
from autoptd.ir import markers
from autoptd.ir.notes import note, ops, output
from autoptd.ir.types import I, P, R, S
from autoptd.passes import Form
from autoptd.passes.communicate import check_over_batch
from tests.passes.graphs import Net, annotate, connect, context, find, run

Tensor = torch.Tensor
X, Y = torch.randn(4, 6), torch.randint(6, (4,))


def loss_of(make: Callable[[Net, Tensor], Tensor]) -> Callable[[Net, Tensor], Tensor]:
    """A model whose logits go through `make` before the loss."""
    return lambda self, x: make(self, F.linear(x, self.w)).square().mean()


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "products of samples": (loss_of(lambda self, x: x @ x.T), "matmul mixes the samples"),
    "products of samples by linear": (loss_of(lambda self, x: F.linear(x, x)), "linear mixes the samples"),
    "cumsum over the batch": (loss_of(lambda self, x: x.cumsum(0)), "cumsum needs it whole"),
    "softmax over the batch": (loss_of(lambda self, x: x.softmax(0)), "softmax needs it whole"),
    "log_softmax over the batch": (loss_of(lambda self, x: x.log_softmax(0)), "log_softmax needs it whole"),
    "sorted batch": (loss_of(lambda self, x: x.sort(0).values), "aten.sort"),
    "flipped batch": (loss_of(lambda self, x: x.flip(0)), "flip needs it whole"),
    "rolled batch": (loss_of(lambda self, x: x.roll(1, 0)), "roll needs it whole"),
    "rolled flat": (loss_of(lambda self, x: x.roll(1)), "aten.roll mixes the samples"),
    "neighbours": (loss_of(lambda self, x: x[1:] - x[:-1]), "an uneven slice needs it whole"),
    "one sample": (loss_of(lambda self, x: x[0]), "a single index needs it whole"),
    "centred on the batch": (loss_of(lambda self, x: x - x.mean(0)), "sum over samples"),
    "maximum over the batch": (loss_of(lambda self, x: x.amax(0)), "needs all values at once"),
    "maximum of all": (loss_of(lambda self, x: x / x.abs().amax()), "needs all values at once"),
    "batch norm": (
        loss_of(lambda self, x: F.batch_norm(x, None, None, training=True)),
        "batch norm in training computes means over the whole batch, which several microbatches do not have",
    ),
    "unknown operator": (
        loss_of(lambda self, x: torch.cdist(x, x)),
        "aten.cdist mixes the samples of the batch .probed",
    ),
    "nothing is known": (
        loss_of(lambda self, x: x.as_strided((2, 3), (1, 1))),
        "has no rule.*register_rule",
    ),
    "fold of samples": (loss_of(lambda self, x: x.reshape(2, -1)), "reads 2 rows together"),
    "fold with features": (
        loss_of(lambda self, x: x.reshape(-1, 8)),
        "mixes the samples|folds the batch|depends on",
    ),
    "exp of the mean": (lambda self, x: F.linear(x, self.w).mean().exp(), "sum over samples is not a sum"),
    "root of the mean": (
        lambda self, x: F.linear(x, self.w).square().mean().sqrt(),
        "sum over samples is not a sum",
    ),
    "square of the mean": (
        lambda self, x: F.linear(x, self.w).mean().square(),
        "sum over samples is not a sum",
    ),
    "product of two means": (
        lambda self, x: F.linear(x, self.w).square().mean() * F.linear(x, self.w).mean(),
        "sum over samples is not a sum",
    ),
    "mean times itself": (
        lambda self, x: mean_times_itself(F.linear(x, self.w).mean()),
        "is not a sum over samples",
    ),
    "ratio of sums": (
        lambda self, x: F.linear(x, self.w).sum() / F.linear(x, self.w).square().sum(),
        "sum over samples is not a sum",
    ),
    "NaN of the mean": (
        lambda self, x: F.linear(x, self.w).mean().nan_to_num(),
        "nan_to_num of a sum over samples",
    ),
    "cast of the mean to numbers": (
        lambda self, x: F.linear(x, self.w).mean().long() * x.mean(),
        "to of a sum over samples",
    ),
    "sum by tensor of size": (
        lambda self, x: F.linear(x, self.w).sum() / torch.tensor(float(x.shape[0])),
        "constant is computed from the number of rows",
    ),
    "sum by full of size": (
        lambda self, x: F.linear(x, self.w).sum() / torch.full((), float(x.shape[0])),
        "computed from the number of rows",
    ),
    "rows told apart": (
        lambda self, x: (F.linear(x, self.w) * torch.arange(x.shape[0])[:, None]).mean(),
        "from the batch|number of rows",
    ),
    "no batch in the loss": (lambda self, x: (self.w * self.w).sum(), "does not contract the batch"),
}


def mean_times_itself(x: Tensor) -> Tensor:
    return x * x


def make(forward: Callable[..., Any]) -> Net:
    return Net(forward, w=(6, 6), rows=(4, 6))


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what: str) -> None:
    forward, fact = REFUSED[what]
    with pytest.raises(PlanError, match=fact) as caught:
        annotate(make(forward), X, pieces=4)
    assert caught.value.remedy and caught.value.site
    annotate(make(forward), X, pieces=1)  # one piece is the whole batch: everything passes


ALLOWED: dict[str, Callable[..., Any]] = {
    "mean": lambda self, x: F.linear(x, self.w).mean(),
    "sum scaled": lambda self, x: 0.5 * F.linear(x, self.w).sum() / 3,
    "one plus the mean": lambda self, x: 1 + F.linear(x, self.w).mean(),
    "one minus the sum": lambda self, x: (1 - F.linear(x, self.w).sum()).float().double() - 0.5,
    "two losses": lambda self, x: F.linear(x, self.w).mean() - 2 * (x @ self.w).square().sum(),
    "mean of means": lambda self, x: F.linear(x, self.w).mean(-1).mean(0),
    "product with a mean of inputs": lambda self, x: x.mean() * F.linear(x, self.w).mean(),
    "over a sum of inputs": lambda self, x: F.linear(x, self.w).sum() / x.sum().clamp(min=1),
    "less the mean of each feature": lambda self, x: F.linear(x - x.mean(0, keepdim=True), self.w).mean(),
    "sum by size": lambda self, x: F.linear(x, self.w).sum() / x.shape[0],
    "stacked losses": lambda self, x: F.linear(x, self.w).sum(0).mean(),
    "zeros like the batch": lambda self, x: (F.linear(x, self.w) + torch.zeros(x.shape[0], 6)).mean(),
    "ones expanded": lambda self, x: (F.linear(x, self.w) * torch.ones(1, 6).expand(x.shape[0], 6)).mean(),
    "mask of equal rows": lambda self, x: (
        F.linear(x, self.w).masked_fill(torch.ones(x.shape[0], 6).tril(9) > 2, 0.0).mean()
    ),
    "positions": lambda self, x: (F.linear(x, self.w) + torch.arange(6)).mean(),
    "norm of each sample": lambda self, x: (x / F.linear(x, self.w).norm(dim=-1, keepdim=True)).mean(),
    "batch moved": lambda self, x: F.linear(x, self.w).t().softmax(0).mean(),
    "halves of features": lambda self, x: sum(one.mean() for one in F.linear(x, self.w).chunk(2, -1)),
}


@pytest.mark.parametrize("what", ALLOWED)
def test_allowed(what: str) -> None:
    graph, _, _ = annotate(make(ALLOWED[what]), X, pieces=4)
    loss = output(graph).args[0]
    assert note(loss).layout.batch == P  # type: ignore[arg-type]


def test_types_over_the_batch() -> None:
    graph, _, _ = annotate(
        make(lambda self, x: (F.linear(x, self.w).t() + torch.arange(4.0)[:1]).mean()), X, pieces=4
    )
    found = {
        name: note(find(graph, name)).layout.batch
        for name in ("w", "inputs", "linear", "t", "arange", "mean")
    }
    assert found == {"w": R, "inputs": S(0, 0), "linear": S(0, 0), "t": S(1, 0), "arange": I, "mean": P}


def test_a_whole_addend_is_shared_among_the_pieces() -> None:
    """An l2 term of the weights is added to the loss once, not once per microbatch."""
    graph, _ = connect(
        make(lambda self, x: F.linear(x, self.w).mean() + (self.w * self.w).sum()), X, pieces=4
    )
    shares = [node for node in ops(graph) if node.target is markers.share]
    assert [node.args[1] for node in shares] == [4]
    assert shares[0].args[0] is find(graph, "sum") and note(shares[0]).layout.batch == P


def test_a_number_is_shared_among_the_pieces() -> None:
    """`1 - mean` is no sum of four ones."""
    graph, _ = connect(make(lambda self, x: 1 - F.linear(x, self.w).mean() + 6), X, pieces=4)
    assert find(graph, "rsub").args[1:] == (0.25,) and find(graph, "add").args[1:] == (1.5,)


def test_a_bias_under_a_sum_over_the_batch_is_shared() -> None:
    """linear that contracts the batch itself: the bias of a Gram matrix is no part of any one microbatch."""
    graph, _ = connect(
        make(lambda self, x: F.linear(F.linear(x, self.w).t(), x.t(), self.rows[0]).sum()), X, pieces=4
    )
    product = find(graph, "linear", 1)
    assert note(product).layout.batch == P
    assert [node.args[1] for node in ops(graph) if node.target is markers.share] == [4]


def test_a_share_has_the_types_of_its_value_over_other_axes() -> None:
    graph, ctx = context(
        make(lambda self, x: F.linear(F.linear(x, self.w).t(), x.t(), self.rows[0]).sum()), X, pieces=4
    )
    run(graph, ctx, Form.CONNECTED)
    check_over_batch(graph, ctx)
    (share,) = [node for node in ops(graph) if node.target is markers.share]
    note(share).layout = note(share).layout.having("tp", S(0, 0))
    with pytest.raises(InternalError, match=r"is tp: S\(0, 0\) over tp, made of"):
        check_over_batch(graph, ctx)


def test_mean_is_divided_by_the_global_count_and_sum_is_not() -> None:
    graph, _, _ = annotate(make(lambda self, x: F.linear(x, self.w).mean() + x.sum()), X, pieces=4)
    assert note(find(graph, "mean")).forms.get("batch", "") == "mean" and not note(find(graph, "sum")).forms


def test_cross_entropy_is_contracted_over_tokens() -> None:
    net = Net(lambda self, x, y: F.cross_entropy(F.linear(x, self.w), y), w=(6, 6))
    graph, _, _ = annotate(net, X, Y, pieces=4)
    assert note(find(graph, "cross_entropy_loss")).forms.get("batch", "") == "token_loss"


def test_batch_norm_with_statistics_takes_the_whole_batch_in_one_piece() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
    net = Net(lambda self, x: self.model(x).square().mean(), model=model)
    annotate(net, X, pieces=1)
    with pytest.raises(AutoptdError, match="batch norm in training computes means over the whole batch"):
        annotate(net, X, pieces=4)


def test_a_parameter_per_row_does_not_even_fit_twice_the_rows() -> None:
    with pytest.raises(AutoptdError, match="broadcast"):
        annotate(make(lambda self, x: (F.linear(x, self.w) + self.rows).mean()), X, pieces=4)


def test_operators_that_depend_on_the_number_of_rows() -> None:
    def forward(self: Net, x: Tensor) -> Tensor:
        for _ in range(x.shape[0]):
            x = F.linear(x, self.w)
        return x.mean()

    with pytest.raises(PlanError, match="operators depend on the number of rows"):
        annotate(make(forward), X, pieces=2)
