"""A buffer under several names that a forward updates: all of them follow, or it is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoptd
from autoptd.errors import PlanError
from tests.parity.buffers import CumulativeNorm, Updating, batches
from tests.parity.test_buffers import Both


class Count(nn.Module):
    """Counts in a tensor that others may have."""

    def __init__(self, count: Tensor, persistent: bool = True) -> None:
        super().__init__()
        self.register_buffer("count", count, persistent=persistent)

    def forward(self, h: Tensor) -> Tensor:
        self.count += 1
        return h * (1 + 0.01 * self.count)


class TwoModules(Updating):
    """One tensor in two modules, of which the first does not save it; in eval mode only the other name is read."""

    def prepare(self) -> None:
        count = torch.zeros(())
        self.one, self.two = Count(count, persistent=False), Count(count)

    def update(self, h: Tensor) -> Tensor:
        return self.one(self.two(h)) if self.training else h * self.two.count


class OneModule(CumulativeNorm):
    """One module under two names."""

    def prepare(self) -> None:
        super().prepare()
        self.alias = self.norm

    def update(self, h: Tensor) -> Tensor:
        return self.alias(h.sin() + self.norm(h))


class Replaced(TwoModules):
    """Another tensor is assigned to one name, which torch's other name does not follow."""

    def update(self, h: Tensor) -> Tensor:
        self.two.count = self.two.count + 1
        return h * self.one.count


class ReplacedTwice(OneModule):
    """As both names are of one module, they follow."""

    def update(self, h: Tensor) -> Tensor:
        self.alias.running_mean = 0.5 * self.alias.running_mean + 1
        return super().update(h)


class View(Updating):
    """One name is a view of the other."""

    def prepare(self) -> None:
        self.register_buffer("view", self.kept.view(2, 4))

    def update(self, h: Tensor) -> Tensor:
        self.kept += 1
        return h * self.view.sum()


class CountsLosses(nn.Module):
    """A loss with state of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, h: Tensor, y: Tensor) -> Tensor:
        self.seen += 1
        return F.mse_loss(h[:, 0], y.to(h)) * self.seen


def make(kind: type[Updating]) -> Updating:
    """Built in float64: a cast of the model would give each name a tensor of its own."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    try:
        return kind()
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.one_in(1)
@pytest.mark.parametrize("kind", [TwoModules, OneModule, ReplacedTwice])
def test_all_names_follow(kind: type[Updating], tmp_path: Path) -> None:
    first, second, third = batches(3)
    both = Both(make(kind), first, d=2, num_microbatches=1 if kind is not TwoModules else 2)
    both.step(first)
    both.evaluate(third)
    both.pm.save(tmp_path / "saved", both.ours)
    other = Both(make(kind), first, t=2, num_microbatches=1)
    other.step(second)
    other.pm.load(tmp_path / "saved", other.ours)
    other.plain, other.theirs = both.plain, both.theirs
    other.evaluate(third)
    other.step(second)
    both.pm.close()
    other.pm.close()


@pytest.mark.parametrize("kind, other", [(Replaced, "two.count"), (View, "view")])
def test_what_would_not_follow_is_refused(kind: type[Updating], other: str) -> None:
    fact = f"is updated by the forward, and shares memory with {re.escape(other)}"
    with pytest.raises(PlanError, match=fact):
        autoptd.compile(make(kind), d=2, example_inputs=batches(1)[0])


def test_names_follow_where_the_model_is_cast() -> None:
    x, y = batches(1)[0]
    call = (x.bfloat16(), y)
    torch.manual_seed(0)
    pm = autoptd.parallelize(TwoModules(), precision="bf16", d=2, backend="local", example_inputs=call)
    pm.step(*call)
    pm.step(*call)
    assert float(pm.state_dict()["two.count"]) == 4
    pm.close()


def test_state_of_a_loss_that_nobody_saves_is_refused() -> None:
    x, y = batches(1)[0]
    with pytest.raises(PlanError, match=r"loss_fn\.seen .*is not in the model.s state dict"):
        autoptd.compile(
            nn.Linear(8, 2).double(), loss_fn=CountsLosses(), d=2, example_inputs={"input": x, "targets": y}
        )
