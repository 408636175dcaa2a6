"""Checkpoints of a narrower dtype than the model's: all their numbers have a place in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import autoptd
from tests.parity.models import batch, gpt

DATA = batch(4)


def started(dtype: torch.dtype, **keywords: Any) -> tuple[autoptd.ParallelModel, Any]:
    pm = autoptd.parallelize(gpt(1).to(dtype), **keywords, backend="local", timeout=30, example_inputs=DATA)
    return pm, pm.optimizer(torch.optim.AdamW, lr=1e-2)


def trained(pm: autoptd.ParallelModel, optimizer: Any) -> float:
    loss = pm.step(*DATA)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss)


@pytest.mark.parametrize(
    ("narrow", "wide", "mesh"),
    [
        (torch.float32, torch.float64, {"d": 2, "zero": 1}),
        (torch.float32, torch.float64, {"p": 2}),
        (torch.bfloat16, torch.bfloat16, {"t": 2, "precision": "bf16"}),
    ],
    ids=str,
)
def test_training_goes_on_in_a_wider_dtype(
    narrow: torch.dtype, wide: torch.dtype, mesh: dict[str, Any], tmp_path: Path
) -> None:
    """As with state dicts, whose moments torch's optimizers widen with their parameter."""
    pm, optimizer = started(narrow)
    trained(pm, optimizer)
    pm.save(tmp_path / "saved", optimizer)
    weights, state = pm.state_dict(), optimizer.state_dict()
    pm.close()
    losses = []
    for is_checkpoint in (True, False):
        pm, optimizer = started(wide, **mesh)
        if is_checkpoint:
            pm.load(tmp_path / "saved", optimizer)
        else:
            pm.load_state_dict(weights)
            optimizer.load_state_dict(state)
        moments = [each["exp_avg"].dtype for each in optimizer.state_dict()["state"].values()]
        assert set(moments) == {torch.float64 if wide == torch.float64 else torch.float32}
        losses.append([trained(pm, optimizer) for _ in range(2)])
        pm.close()
    assert losses[0] == losses[1]
