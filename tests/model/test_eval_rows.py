"""`eval_step` of batches with fewer rows, in any order of calls: the loss of one device on those rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autoptd
from autoptd.errors import PlanError


class Model(nn.Module):
    """A mean over the labels that are not ignored; eval mode has no dropout."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.first, self.second = nn.Embedding(11, 8), nn.Linear(8, 12), nn.Linear(12, 11)
        self.dropout = nn.Dropout(0.3)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        y = self.second(self.dropout(self.first(self.embed(ids)).relu()))
        return F.cross_entropy(y.flatten(0, 1), labels.flatten(), ignore_index=-100)


def batch(rows: int, length: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    ids = (torch.arange(rows * length).view(rows, length) * 7 + rows) % 11
    # Another number of labels counts in each row.
    return ids, torch.where(torch.arange(length) < 1 + torch.arange(rows)[:, None] % length, ids, -100)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("options", [{"d": 2}, {"t": 2, "p": 2, "num_microbatches": 2}, {"c": 2}], ids=str)
@pytest.mark.parametrize("sizes", [(2, 8, 4, 8, 2), (8, 4), (4, 2, 6)], ids=str)
def test_any_number_of_rows_up_to_the_compiled_one(options: dict[str, Any], sizes: tuple[int, ...]) -> None:
    model = Model().double()
    pm = autoptd.parallelize(model, backend="local", example_inputs=batch(8), **options)
    optimizer = pm.optimizer(torch.optim.SGD, lr=0.5)
    plain = Model().double()
    for rows in sizes:
        pm.step(*batch(8))
        optimizer.step()
        optimizer.zero_grad()
        plain.load_state_dict(pm.state_dict())
        wanted = plain.eval()(*batch(rows)).item()
        assert pm.eval_step(*batch(rows)).item() == pytest.approx(wanted, rel=1e-12)
    assert len(pm.sizes.evaluating) == len(set(sizes))
    assert pm.programs == (pm.program,)  # those of evaluations train nothing
    pm.close()


def test_rows_that_first_come_right_after_an_update() -> None:
    """With zero=1 weights are gathered while the program for so many rows is compiled and loaded."""
    pm = autoptd.parallelize(Model().double().eval(), backend="local", example_inputs=batch(8), d=2, zero=1)
    ours, plain = pm.optimizer(torch.optim.SGD, lr=0.5), Model().double().eval()
    theirs = torch.optim.SGD(plain.parameters(), lr=0.5)
    for rows in (6, 8, 5):
        pm.step(*batch(8))
        plain(*batch(8)).backward()
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        assert pm.eval_step(*batch(rows)).item() == pytest.approx(plain(*batch(rows)).item(), rel=1e-12)
    pm.close()


@pytest.mark.parametrize(
    "options", [{"p": 2, "num_microbatches": 4}, {"d": 2, "num_microbatches": 2}], ids=str
)
def test_rows_that_do_not_divide_into_microbatches(options: dict[str, Any]) -> None:
    """As many microbatches as divide them, instead."""
    model = Model().double()
    pm = autoptd.parallelize(model, backend="local", example_inputs=batch(8), **options)
    for rows in (6, 2, 8):
        wanted = model.eval()(*batch(rows)).item()
        assert pm.eval_step(*batch(rows)).item() == pytest.approx(wanted, rel=1e-12)
    pm.close()


class OtherLoss(nn.Module):
    """A loss by its name, over the outputs of two layers."""

    def __init__(self, loss: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.loss, self.embed, self.head = loss, nn.Embedding(11, 8), nn.Linear(8, 11)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8) if loss == "batch norm" else nn.Identity()
        self.register_buffer("weight", torch.rand(11) + 0.1)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> Any:
        y = self.head(self.second(self.first(self.norm(self.embed(ids).mT).mT).relu()))
        each = F.cross_entropy(y.flatten(0, 1), labels.flatten(), self.weight, reduction="none")
        if self.loss == "sum over rows":
            return each.sum() / len(ids), y
        if self.loss == "own mask":
            mask = (labels >= 0).flatten().to(y.dtype)
            return (each * (mask - mask.mean())).sum() / mask.sum()
        if self.loss == "mean":
            return y.pow(2).mean() + 0.1 * self.head.weight.pow(2).sum() + 3.0
        if self.loss == "rows meet":
            return F.cross_entropy(y.mean(1) @ y.mean(1).T, torch.arange(len(ids)))
        return F.cross_entropy(y.flatten(0, 1), labels.flatten(), self.weight)


@pytest.mark.parametrize("loss", ["class weights", "sum over rows", "own mask", "mean", "batch norm"])
def test_rows_that_replicas_do_not_divide(loss: str) -> None:
    """Some have fewer microbatches of them, or none, and take part in sums all the same."""
    model = OtherLoss(loss).double()
    axis = "p" if loss == "class weights" else "t"
    mesh: dict[str, Any] = {axis: 2, "num_microbatches": 2} if loss != "batch norm" else {}
    pm = autoptd.parallelize(model, backend="local", d=4, example_inputs=batch(16), **mesh)
    for rows, counts in ((13, (4, 3, 3, 3)), (6, (2, 2, 2, 0)), (1, (1, 0, 0, 0)), (16, ())):
        model.load_state_dict(pm.state_dict())
        wanted = model.eval()(*batch(rows))
        wanted = (wanted[0] if isinstance(wanted, tuple) else wanted).item()
        assert pm.eval_step(*batch(rows)).item() == pytest.approx(wanted, rel=1e-12)
        assert loss == "batch norm" or pm.sizes.evaluating[-1].row_counts == counts
    pm.close()


def test_one_loss_for_all_of_them_is_refused() -> None:
    pm = autoptd.parallelize(OtherLoss("rows meet"), d=2, backend="local", example_inputs=batch(8))
    with pytest.raises(PlanError, match=r"\[2, 1\]: .* mixes the samples .*a multiple of 2 rows"):
        pm.eval_step(*batch(3))
    assert pm.eval_step(*batch(6)).isfinite()
    pm.close()


def test_other_calls_are_refused_in_the_name_of_eval_step() -> None:
    pm = autoptd.parallelize(Model(), d=2, backend="local", example_inputs=batch(8))
    with pytest.raises(PlanError, match=r"^eval_step: was called with 1 argument"):
        pm.eval_step(batch(8)[0])  # before any other
    with pytest.raises(PlanError, match=r"^eval_step: its arguments differ"):
        pm.eval_step(batch(8)[0], [batch(8)[1]])
    pm.eval_step(*batch(4))
    ids, labels = batch(8, 6)
    with pytest.raises(PlanError, match=r"^eval_step: ids is \[8, 6\]"):
        pm.eval_step(ids, labels)
    with pytest.raises(PlanError, match=r"^eval_step: ids is \[10, 4\]"):
        pm.eval_step(*batch(10))
    with pytest.raises(PlanError, match=r"^eval_step: was called with 1 argument"):
        pm.eval_step(ids)
    with pytest.raises(PlanError, match=r"^eval_step: its arguments differ from the compiled ones"):
        pm.eval_step((ids, ids), labels)
    with pytest.raises(PlanError, match=r"^eval_step: ids is .* float32"):
        pm.eval_step(ids.float(), labels)
    with pytest.raises(PlanError, match=r"^pm.eval_step with ids \[3, 4\].*: labels: is \[4, 4\],.* 3"):
        pm.eval_step(batch(3)[0], batch(4)[1])
    assert pm.eval_step(*batch(6)).isfinite()
    pm.close()


class Divided(nn.Module):
    """A sum, divided by a number of labels that is joined with an integer."""

    def __init__(self, join: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.join, self.first = join, nn.Linear(4, 5)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.first(x), y, reduction="sum") / self.join((y > 1).sum())


@pytest.mark.parametrize(
    "join",
    [
        lambda count: torch.stack([count, torch.tensor(7)]).amax(),
        lambda count: torch.cat([count[None], torch.tensor([7])]).sum(),
        lambda count: torch.cat([torch.arange(3), count[None]]).sum(),
    ],
    ids=["at least", "and", "behind"],
)
def test_an_integer_that_is_joined_with_a_count(join: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Each of three microbatches would add a third of it, which is none."""
    x = torch.linspace(-1, 1, 32, dtype=torch.float64).view(8, 4).sin()
    y, model = torch.arange(8) % 5, Divided(join).double()
    pm = autoptd.parallelize(model, d=2, backend="local", example_inputs=(x, y))
    for rows in (8, 3):
        assert float(pm.eval_step(x[:rows], y[:rows])) == pytest.approx(
            float(model(x[:rows], y[:rows])), rel=1e-12
        )
    assert float(pm.step(x, y)) == pytest.approx(float(model(x, y)), rel=1e-12)
    pm.close()


class Branching(nn.Module):
    """Picks another tensor for more than 4 rows; the operators are the same."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        g = self.second(h)
        return F.mse_loss(h if len(x) > 4 else g, y) + F.mse_loss(g, 2 * y)


def test_a_branch_of_the_number_of_rows_is_refused() -> None:
    x = torch.linspace(-1, 1, 32).view(8, 4)
    for mesh in ({"d": 2}, {"num_microbatches": 2}, {"p": 2, "num_microbatches": 4}):
        with pytest.raises(PlanError, match="its operators depend on the number of rows in the batch"):
            autoptd.parallelize(Branching(), backend="local", example_inputs=(x, x), **mesh)
