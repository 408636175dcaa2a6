"""torchdata's loader in `extra=`: a run that is resumed in the middle of an epoch reads the rows that it would have read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from tests.parity.models import LENGTH
from tests.runtime.checkpoint.models import VOCAB, assert_same, running, state_of

stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
# Ten steps an epoch.
ROWS, BATCH = 80, 8


class Texts(Dataset[tuple[int, Tensor]]):
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> tuple[int, Tensor]:
        return row, (torch.arange(LENGTH) * (row + 1)) % VOCAB


class Run:
    """A model, and a shuffled loader of global batches; `ids` are the rows of each step, in the order in which they came."""

    def __init__(self, workers: int) -> None:
        # Of the order of rows, in the first epoch.
        torch.manual_seed(5)
        self.pm, self.opt = running(t=2)
        self.loader = stateful.StatefulDataLoader(
            Texts(), batch_size=BATCH, shuffle=True, num_workers=workers
        )
        self.ids: list[list[int]] = []
        self.losses: list[float] = []

    def go_on(self, ckpt: Any, until: int) -> None:
        while self.pm.steps < until:
            for rows, x in self.loader:
                loss = self.pm.step(*self.pm.local_batch(x, x.roll(-1, 1)))
                self.opt.step()
                self.opt.zero_grad()
                self.ids.append(rows.tolist())
                self.losses.append(float(loss))
                assert ckpt is None or ckpt.step(loss)
                if self.pm.steps == until:
                    return


@pytest.mark.thorough
def test_seven_steps_and_thirteen_are_twenty(tmp_path: Path) -> None:
    whole = Run(workers=2)
    whole.go_on(None, 20)
    first = Run(workers=2)
    with first.pm.checkpointer(tmp_path, first.opt, every=7, extra={"loader": first.loader}) as ckpt:
        first.go_on(ckpt, 7)
    # Draws of the process between the two are not those of a run that went on.
    torch.rand(100)
    then = Run(workers=2)
    with then.pm.checkpointer(tmp_path, then.opt, every=100, extra={"loader": then.loader}) as ckpt:
        assert ckpt.resume() == tmp_path / "step-00000007"
        then.go_on(ckpt, 20)
    assert first.ids + then.ids == whole.ids
    # Each epoch has each row once, in another order.
    epochs = [[row for ids in whole.ids[start : start + 10] for row in ids] for start in (0, 10)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(ROWS)) and epochs[0] != epochs[1]
    assert first.losses + then.losses == whole.losses
    assert_same(state_of(then.pm, then.opt), state_of(whole.pm, whole.opt))
    for run in (whole, first, then):
        run.pm.close()
