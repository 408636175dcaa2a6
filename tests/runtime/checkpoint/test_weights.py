"""`parallelize(weights=)` takes checkpoints: the parameters of a run, for a model that has no values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import autoptd
from autoptd.errors import PlanError
from tests.parity.models import gpt
from tests.runtime.checkpoint.models import data, running, tied_gpt, train


def on_meta(make: Callable[[], nn.Module] = tied_gpt) -> nn.Module:
    """A model without values; made there, as `.to("meta")` would untie it."""
    with torch.device("meta"):
        return make()


@pytest.mark.parametrize("mesh", [{}, {"t": 2, "p": 2}, {"d": 2, "zero": 1}], ids=str)
def test_weights_of_a_checkpoint(tmp_path: Path, mesh: dict[str, Any]) -> None:
    pm, optimizer = running(t=2, d=2)
    train(pm, optimizer, 2)
    pm.save(tmp_path / "saved", optimizer=optimizer)
    expected = pm.state_dict()
    pm.close()
    weights = tmp_path / "saved"
    other = autoptd.parallelize(on_meta(), **mesh, weights=weights, example_inputs=data(0), backend="local")
    found = other.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], x) for name, x in expected.items())
    assert other.steps == 0
    other.close()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_weights_of_another_program(tmp_path: Path) -> None:
    model = tied_gpt()
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "saved")
    pm = autoptd.parallelize(
        on_meta(), t=2, weights=tmp_path / "saved", example_inputs=data(0), backend="local"
    )
    found = pm.state_dict()
    assert all(torch.equal(found[name], x) for name, x in model.state_dict().items())
    pm.close()


def test_weights_of_another_model(tmp_path: Path) -> None:
    pm, _ = running(t=2)
    pm.save(tmp_path / "saved")
    pm.close()
    with pytest.raises(PlanError, match=r"missing: transformer.h.\*.ln_1.weight"):
        autoptd.parallelize(on_meta(lambda: gpt(layers=4, vocab=61).double()), weights=tmp_path / "saved")
