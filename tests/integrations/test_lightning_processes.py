"""A Trainer of Lightning with one process per rank, as torchrun starts them: against Lightning in one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.forks import told

pytest.importorskip("lightning")
from tests.integrations.train_lightning import run

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(
    "mesh", [{"d": 2}, pytest.param({"t": 2, "p": 2}, marks=pytest.mark.thorough)], ids=str
)
def test_processes_train_save_and_resume(mesh: dict[str, int], tmp_path: Path) -> None:
    ranks = 2 if mesh == {"d": 2} else 4
    found = told(
        Path(__file__).parent / "train_lightning.py", ranks, json.dumps(mesh), str(tmp_path / "ranks")
    )
    first: dict[str, Any] = run(None, tmp_path / "one", epochs=2)
    second = run(None, tmp_path / "one", epochs=3, ckpt_path=first["folders"][1])
    for own in found:
        for name, expected in (("first", first), ("second", second)):
            assert own[name]["metrics"] == pytest.approx(expected["metrics"], rel=1e-9)
            assert own[name]["weights"] == pytest.approx(expected["weights"], rel=1e-9, abs=1e-9)
            assert own[name]["outputs"] == expected["outputs"]
            assert own[name]["folders"] == found[0][name]["folders"]
        assert "read another batch than rank 0" in own["said"]
    assert (Path(found[0]["first"]["folders"][1] + ".ranks")).is_dir()
