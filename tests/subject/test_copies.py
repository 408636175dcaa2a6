"""What cannot be copied says what to use, and buffers in float8."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import autoptd
from autoptd.errors import PlanError
from autoptd.program.program import Program

BATCH = torch.linspace(-1, 1, 32).view(4, 8), torch.linspace(1, 0, 32).view(4, 8)


class Net(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("table", torch.randn(8, 8).to(dtype))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.down(self.up(x) @ self.table.to(x.dtype)) - y).square().mean()


COPIES: list[Callable[[Any], Any]] = [
    copy.copy,
    copy.deepcopy,
    pickle.dumps,
    AveragedModel,
    lambda pm: torch.save({"model": pm}, io.BytesIO()),
]


def test_a_running_model_is_not_copied_and_says_what_to_use(tmp_path: Path) -> None:
    model = Net()
    pm = autoptd.parallelize(model, t=2, backend="local", example_inputs=BATCH)
    try:
        for made in COPIES:
            with pytest.raises(PlanError, match=r"copied nor pickled.*model.load_state_dict\(weights"):
                made(pm)
        with pytest.raises(PlanError, match=r"program\.save"):
            copy.deepcopy(pm.program)
        pm.program.save(tmp_path)
        assert copy.deepcopy(Program.load(tmp_path)).fingerprint() == pm.program.fingerprint()
        averaged = AveragedModel(model)
        optimizer = pm.optimizer(torch.optim.SGD, lr=0.1)
        pm.step(*BATCH)
        optimizer.step()
        model.load_state_dict(pm.state_dict())
        averaged.update_parameters(model)
        assert torch.equal(averaged.module.up.weight, pm.state_dict()["up.weight"])
    finally:
        pm.close()


def test_a_buffer_in_float8_stays_one(tmp_path: Path) -> None:
    model, batch = Net(torch.float8_e4m3fn), BATCH
    pm = autoptd.parallelize(model, t=2, backend="local", example_inputs=batch)
    try:
        assert (
            abs(pm.step(*batch) - model(*batch)) < 1e-6 and abs(pm.eval_step(*batch) - model(*batch)) < 1e-6
        )
        state = pm.state_dict()
        assert state["table"].dtype == torch.float8_e4m3fn
        pm.save(tmp_path)
        pm.load(tmp_path)
        pm.load_state_dict(state | {"table": torch.zeros(8, 8).to(torch.float8_e4m3fn)})
        model.table.zero_()
        assert abs(pm.step(*batch) - model(*batch)) < 1e-6
    finally:
        pm.close()
