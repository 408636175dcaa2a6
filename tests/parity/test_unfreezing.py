"""Parameters that are frozen and unfrozen between steps: refused, and the remedy trains as one device does."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import autoptd
from autoptd.errors import PlanError
from tests.hostile.against_torch import assert_near
from tests.hostile.test_operators import Body, data


@pytest.mark.one_in(1)
@pytest.mark.parametrize("mesh", [{"t": 2, "p": 2}, {"d": 2, "zero": 1}], ids=str)
def test_the_remedy_keeps_weights_and_moments(mesh: dict[str, Any], tmp_path: Path) -> None:
    model = Body(lambda s, h, y: (h * s.w).square().mean()).double()
    model.layers[0].requires_grad_(False)
    reference = copy.deepcopy(model)
    theirs = torch.optim.AdamW(reference.parameters(), lr=0.05)
    for phase in range(2):
        pm = autoptd.parallelize(model, **mesh, backend="local", num_microbatches=2, example_inputs=data(0))
        ours = pm.optimizer(torch.optim.AdamW, lr=0.05)
        if phase == 1:
            pm.load(tmp_path / "saved", ours)
        for step in range(2):
            pm.step(*data(2 * phase + step))
            reference(*data(2 * phase + step)).backward()
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
        assert_near(pm.state_dict(), dict(reference.state_dict()), 1e-3)
        if phase == 0:
            pm.save(tmp_path / "saved", ours)
            first = next(pm.parameters())
            first.requires_grad_(not first.requires_grad)
            with pytest.raises(PlanError, match=r"pm.save.folder, optimizer.*parallelize it again"):
                pm.step(*data(0))
        pm.close()
        for one in (model, reference):
            one.layers[0].requires_grad_(True)
            one.layers[2].requires_grad_(False)
