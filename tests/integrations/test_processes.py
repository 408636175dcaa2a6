"""A Trainer with one process per rank, as torchrun starts them: against transformers in one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.forks import told
from tests.integrations.runs import Rows, gpt2, in_float64, one_device
from tests.integrations.train_ranks import HOW, metrics

pytestmark = pytest.mark.processes


def is_close(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> bool:
    """Tell whether logs agree to 1e-6 (transformers adds up losses in float32), but for the mean of a session."""
    assert [log.keys() for log in found] == [log.keys() for log in expected]
    numbers = [
        (own[key], value)
        for own, other in zip(found, expected, strict=True)
        for key, value in other.items()
        if key != "train_loss"
    ]
    return all(abs(own - value) <= 1e-6 * max(abs(value), 1e-9) for own, value in numbers)


@pytest.mark.parametrize(
    "mesh",
    [
        {"d": 2},
        pytest.param({"t": 2, "d": 2}, marks=pytest.mark.thorough),
        pytest.param({"t": 2, "p": 2}, marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_processes_train_save_and_resume(mesh: dict[str, int], tmp_path: Path) -> None:
    ranks = 2 if mesh == {"d": 2} else 4
    found = told(Path(__file__).parent / "train_ranks.py", ranks, json.dumps(mesh), str(tmp_path / "ranks"))
    how = {**HOW, "save_strategy": "no"}
    data = {"data": Rows(21), "eval_dataset": Rows(5, seed=3), "compute_metrics": metrics}
    expected = one_device(lambda: in_float64(gpt2()), tmp_path / "one", mesh.get("d", 1), **data, **how)
    for rank in found:
        assert is_close(rank["logs"], expected.logs) and is_close(rank["resumed"], expected.logs)
        evaluated = [log["eval_loss"] for log in expected.logs if "eval_loss" in log]
        assert abs(float(rank["edited"][0]) - evaluated[-1]) > 1e-3
        assert "load_state_dict" in rank["edited"][1], rank["edited"]
        assert rank["is_same"] and "read another batch than rank 0" in rank["said"]
    assert (tmp_path / "ranks" / "final" / "model.safetensors").exists()
    assert len(list((tmp_path / "ranks" / "checkpoint-4").glob("rng_state_*.pth"))) == ranks
