"""`eval_step` of batches with fewer rows, in any order of calls: the loss of one device on those rows."""

from __future__ import annotations

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
    assert len(pm._programs.evaluating) == len(set(sizes))
    assert pm.programs == (pm.program,)  # those of evaluations train nothing
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


def test_other_calls_are_refused_in_the_name_of_eval_step() -> None:
    pm = autoptd.parallelize(Model(), d=2, backend="local", example_inputs=batch(8))
    pm.eval_step(*batch(4))
    ids, labels = batch(8, 6)
    with pytest.raises(PlanError, match=r"^eval_step: ids is \[8, 6\]"):
        pm.eval_step(ids, labels)
    with pytest.raises(PlanError, match=r"^eval_step: ids is \[10, 4\]"):
        pm.eval_step(*batch(10))
    with pytest.raises(PlanError, match=r"^eval_step: was called with 1 argument"):
        pm.eval_step(ids)
    with pytest.raises(PlanError, match=r"^eval_step: ids is .* float32"):
        pm.eval_step(ids.float(), labels)
    with pytest.raises(PlanError, match=r"^pm.eval_step with ids \[3, 4\]"):
        pm.eval_step(*batch(3))  # d=2 does not divide them
    assert pm.eval_step(*batch(6)).isfinite()
    pm.close()
