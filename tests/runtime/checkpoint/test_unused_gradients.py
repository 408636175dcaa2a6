"""A checkpoint has no gradients: saving between steps that add up, or loading over gradients, is warned of once."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import autoptd
from tests.runtime.params.test_own_optimizers import batch, net


@pytest.mark.parametrize(
    "keywords", [{"d": 2}, {"d": 2, "zero": 1}, {"d": 2, "precision": "bf16-mixed"}], ids=str
)
def test_saving_and_loading_with_gradients_that_no_update_used(
    keywords: dict[str, Any], tmp_path: Path
) -> None:
    model = net().float() if "precision" in keywords else net()
    dtype = next(model.parameters()).dtype
    x, y = (value.to(dtype) for value in batch(0))
    pm = autoptd.parallelize(model, **keywords, backend="local", example_inputs=(x, y))
    opt = pm.optimizer(torch.optim.SGD, lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pm.save(tmp_path / "a", opt)
        pm.step(x, y)
        opt.step()
        # Used, though not forgotten yet: many loops do that at the start of a step.
        pm.save(tmp_path / "a", opt)
        pm.load(tmp_path / "a", opt)
        pm.step(x, y)
        opt.zero_grad(set_to_none=False)
        pm.save(tmp_path / "a", opt)
    pm.step(x, y)
    with pytest.warns(UserWarning, match=r"pm.save: .*no checkpoint has them: save after optimizer.step\(\)"):
        pm.save(tmp_path / "b", opt)
    with pytest.warns(UserWarning, match=r"pm.load: .*call optimizer.zero_grad\(\) first; num_microbatches="):
        pm.load(tmp_path / "b", opt)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pm.save(tmp_path / "b", opt)
    with (
        pytest.warns(UserWarning, match="pm.checkpointer: .*save after"),
        pm.checkpointer(tmp_path / "c", opt, every=1) as ckpt,
    ):
        ckpt.step()
    pm.close()
