"""A2: a run that was saved and resumed is, to the bit, the run that went on: with all that a training loop has."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import autoptd
from autoptd.errors import PlanError
from tests.runtime.checkpoint.models import VOCAB, assert_same, running, state_of, tied_gpt, train


class Rows:
    """A loader of global batches with a position: shuffled rows, epoch by epoch."""

    def __init__(self, rows: int = 40, batch: int = 8) -> None:
        self.batch, self.epoch, self.at = batch, 0, 0
        generator = torch.Generator().manual_seed(5)
        self.data = torch.randint(0, VOCAB, (rows, 9), generator=generator)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            order = torch.randperm(len(self.data), generator=torch.Generator().manual_seed(self.epoch))
            while self.at < len(order):
                rows = self.data[order[self.at : self.at + self.batch]]
                self.at += self.batch
                yield rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
            self.epoch, self.at = self.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "at": self.at, "last": [self.epoch, (self.at, 0.5)]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.at = state["epoch"], state["at"]


class Run:
    """A training script: dropout, clipping, a scheduler, a shuffled loader, random numbers of its own."""

    def __init__(self, **keywords: Any) -> None:
        model = tied_gpt()
        model.transformer.drop = nn.Dropout(0.2)
        self.pm, self.optimizer = running(model, **keywords)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 1e-2, total_steps=30)
        self.loader = Rows()
        self.extra = {"scheduler": self.scheduler, "loader": self.loader}
        self.losses: list[float] = []
        self.noise: list[float] = []

    def train(self, steps: int) -> None:
        for _, batch in zip(range(steps), self.loader, strict=False):
            self.losses.append(float(self.pm.step(*batch)))
            self.pm.clip_grad_norm_(0.5)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.noise.append(float(torch.rand(())) + random.random())

    def save(self, folder: Path) -> None:
        self.pm.save(folder, optimizer=self.optimizer, extra=self.extra)

    def load(self, folder: Path) -> None:
        self.pm.load(folder, optimizer=self.optimizer, extra=self.extra)


MESHES = [{"t": 2, "p": 2, "d": 2}, {"d": 2, "zero": 1}]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_resumed_is_the_run_that_went_on(tmp_path: Path, mesh: dict[str, Any]) -> None:
    torch.manual_seed(0)
    random.seed(0)
    whole = Run(**mesh)
    whole.train(3)
    whole.save(tmp_path / "saved")
    # Beyond the end of an epoch of five.
    whole.train(4)
    resumed = Run(**mesh)
    torch.manual_seed(9)
    random.seed(9)
    resumed.load(tmp_path / "saved")
    resumed.train(4)
    assert resumed.losses == whole.losses[3:]
    assert resumed.noise == whole.noise[3:]
    assert_same(state_of(resumed.pm, resumed.optimizer), state_of(whole.pm, whole.optimizer))
    assert resumed.scheduler.get_last_lr() == whole.scheduler.get_last_lr()
    whole.pm.close()
    resumed.pm.close()


class Noisy(nn.Module):
    """A persistent buffer that a user sets, which the loss depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 8)
        self.register_buffer("scale", torch.ones(8))
        self.register_buffer("empty", torch.ones(0))

    def forward(self, x: Tensor) -> Tensor:
        return (self.head(x) * self.scale).square().mean()


def test_buffers_come_back(tmp_path: Path) -> None:
    x = torch.randn(4, 8)
    pm = autoptd.parallelize(Noisy(), t=2, example_inputs=(x,), backend="local")
    state = pm.state_dict()
    pm.load_state_dict({**state, "scale": torch.arange(8.0)})
    loss = pm.step(x)
    pm.save(tmp_path / "saved")
    pm.load_state_dict(state)
    assert pm.step(x) != loss
    pm.load(tmp_path / "saved")
    assert torch.equal(pm.state_dict()["scale"], torch.arange(8.0))
    assert pm.step(x) == loss
    pm.close()


def test_an_optimizer_that_has_not_stepped_yet(tmp_path: Path) -> None:
    """And one of some parameters: there is no state of the others, and loading takes away what was there."""
    pm = running(t=2)[0]
    optimizer = pm.optimizer(torch.optim.AdamW, [{"params": ["*.bias"]}, {"params": "*wte*", "lr": 3.0}])
    pm.save(tmp_path / "saved", optimizer=optimizer)
    expected = state_of(pm, optimizer)
    pm.step(*Rows().__iter__().__next__())
    optimizer.step()
    optimizer.param_groups[1]["lr"] = 7.0
    pm.load(tmp_path / "saved", optimizer=optimizer)
    assert_same(state_of(pm, optimizer), expected)
    assert optimizer.param_groups[1]["lr"] == 3.0
    pm.close()


def test_two_optimizers(tmp_path: Path) -> None:
    """One of them goes into extra; where it does not, that is told, as its state would be lost."""

    def start() -> tuple[Any, Any, Any]:
        pm = running(d=2, zero=1)[0]
        kinds = (torch.optim.AdamW, ["*.bias"], 1e-2), (torch.optim.SGD, ["*.weight"], 1e-1)
        return pm, *(pm.optimizer(kind, names, lr=lr, weight_decay=0.1) for kind, names, lr in kinds)

    def one_step(pm: Any, *optimizers: Any) -> float:
        loss = pm.step(*next(iter(Rows())))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return float(loss)

    pm, first, second = whole = start()
    second.param_groups[0]["momentum"] = 0.9
    one_step(*whole)
    with pytest.warns(UserWarning, match="the state of another SGD over other parameters is not saved"):
        pm.save(tmp_path / "saved", optimizer=first)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pm.save(tmp_path / "saved", optimizer=first, extra={"second": second})
        resumed = start()
        resumed[0].load(tmp_path / "saved", optimizer=resumed[1], extra={"second": resumed[2]})
    assert [one_step(*resumed) for _ in range(2)] == [one_step(*whole) for _ in range(2)]
    pm.close()
    resumed[0].close()


def test_an_optimizer_in_extra_has_its_state_on_rank_0_alone() -> None:
    """Processes of other replicas have nothing to add, and load what rank 0 handed in."""
    from autoptd.runtime.checkpoint.extra import merged, own_state, read_extra

    pm, optimizer = running()
    parts = []
    for full in (True, False):
        state = optimizer.state_dict() if full else {}
        with mock.patch.object(type(optimizer), "state_dict", lambda _, state=state: state):
            parts.append(own_state({"second": optimizer}, torch.device("cpu")))
    assert len(read_extra(merged(parts, [0, 1]), "extra.pt")["extra"]["second"]) == 1
    pm.close()


class Scaled(nn.Module):
    """A parameter without dims, like the numbers that some optimizers keep beside moments."""

    def __init__(self) -> None:
        super().__init__()
        self.model = tied_gpt()
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        return self.model(ids, targets)[1] * self.scale


def test_replicas_with_positions_of_their_own() -> None:
    """Their states are kept one by one, and only as many replicas take them up."""
    from autoptd.runtime.checkpoint.extra import (
        Place,
        check_extra,
        merged,
        own_state,
        read_extra,
        restore_extra,
    )

    places = []
    for at in (0, 8):
        loader = Rows()
        loader.at = at
        places.append(own_state({"loader": loader, "same": Rows()}, torch.device("cpu")))
    content = read_extra(merged(places, [0, 1]), "extra.pt")
    assert len(content["extra"]["loader"]) == 2 and len(content["extra"]["same"]) == 1
    loader = Rows()
    with pytest.raises(PlanError, match="has separate states of 2 replicas, and there are 4 now"):
        check_extra(content, {"loader": loader}, Place(0, 4, 0, 4))
    check_extra(content, {"same": loader}, Place(0, 4, 0, 4))
    restore_extra(content, {"loader": loader}, Place(1, 2, 1, 2), torch.device("cpu"))
    assert loader.at == 8
    with pytest.warns(UserWarning, match="random states of 2 processes .* there are 4 processes now"):
        restore_extra(content, {"same": loader}, Place(0, 4, 0, 4), torch.device("cpu"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the others leave it to the first
        restore_extra(content, {"same": loader}, Place(1, 4, 1, 4), torch.device("cpu"))


@pytest.mark.parametrize(
    "kind", [torch.optim.AdamW, pytest.param(torch.optim.SGD, marks=pytest.mark.thorough)]
)
def test_settings_that_are_numbers_of_numpy(tmp_path: Path, kind: Any) -> None:
    """They come back as such, since products with them are rounded in their dtype; a scheduler that has them goes on."""
    numpy = pytest.importorskip("numpy")

    def start() -> tuple[Any, Any, Any]:
        settings: dict[str, Any] = {"lr": numpy.float32(1e-3), "weight_decay": numpy.float64(0.1)}
        if kind is torch.optim.AdamW:
            settings["betas"] = (numpy.float64(0.9), 0.95)
        pm, optimizer = running(None, kind, settings, t=2)
        return pm, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)

    def go_on(pm: Any, optimizer: Any, scheduler: Any) -> list[float]:
        losses = []
        for _ in range(3):
            losses += train(pm, optimizer, 1)
            scheduler.step()
        return losses

    whole = start()
    go_on(*whole)
    whole[0].save(tmp_path / "saved", optimizer=whole[1])
    expected = go_on(*whole)
    resumed = start()
    resumed[0].load(tmp_path / "saved", optimizer=resumed[1])
    resumed[2].load_state_dict({**resumed[2].state_dict(), "last_epoch": 3, "_step_count": 4})
    assert go_on(*resumed) == expected
    assert_same(state_of(*resumed[:2]), state_of(*whole[:2]))
    for one, other in zip(resumed[1].param_groups, whole[1].param_groups, strict=True):
        assert {key: type(value) for key, value in one.items()} == {
            key: type(value) for key, value in other.items()
        }
    # For other programs they are Python's.
    lr = {"optimizer.param_groups.0.lr": None}
    torch.distributed.checkpoint.load(lr, checkpoint_id=str(tmp_path / "saved"), no_dist=True)
    assert type(lr["optimizer.param_groups.0.lr"]) is float
    whole[0].close()
    resumed[0].close()


@pytest.mark.parametrize(
    "kind", [torch.optim.NAdam, pytest.param(torch.optim.ASGD, marks=pytest.mark.thorough)]
)
def test_numbers_without_dims_go_from_zero_to_zero_and_back(tmp_path: Path, kind: Any) -> None:
    """With zero=1 a parameter without dims is stored as one element, as its moments are, and its numbers are not."""
    whole, optimizer = running(Scaled(), kind, d=2)
    expected = train(whole, optimizer, 3)
    losses: list[float] = []
    for number, mesh in enumerate([{"zero": 1}, {}, {"zero": 1}]):
        pm, again = running(Scaled(), kind, d=2, **mesh)
        if number:
            pm.load(tmp_path / str(number - 1), optimizer=again)
        losses += train(pm, again, 1)
        pm.save(tmp_path / str(number), optimizer=again)
        if number == 2:
            assert_same(state_of(pm, again), state_of(whole, optimizer))
        pm.close()
    assert losses == expected
    whole.close()
