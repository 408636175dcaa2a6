"""The line about checkpoints of `autoptd show`: bytes are those of a checkpoint that was saved, seconds and interval follow."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from autoptd.runtime.checkpoint.manifest import MODEL
from autoptd.runtime.checkpoint.read import open_checkpoint
from autoptd.wings.cli import main
from autoptd.wings.reports.summary import CheckpointCosts, checkpoint_costs
from tests.runtime.checkpoint.models import running, train
from tests.wings.cli.test_commands import GPT


def test_bytes_are_those_that_a_save_writes(tmp_path: Path) -> None:
    """Tied, padded and frozen parameters, float32 copies, divided over replicas: each element once."""
    pm, optimizer = running(precision="bf16", t=2, d=2, zero=1)
    train(pm, optimizer, 1)
    pm.save(tmp_path / "saved", optimizer=optimizer)
    costs = checkpoint_costs(pm.program)
    pm.close()
    weights = moments = 0
    for name, record in open_checkpoint(tmp_path / "saved").manifest.tensors.items():
        nbytes = torch.Size(record.shape).numel() * getattr(torch, record.dtype).itemsize
        if name.startswith(MODEL):
            # The other name of the tied one has the same chunks.
            weights += nbytes if name != "model.lm_head.weight" else 0
        elif not name.endswith(".step"):
            moments += nbytes
    assert (costs.weight_bytes, costs.moment_bytes) == (weights, moments)
    assert costs.total_bytes == weights + moments


def test_seconds_and_interval_are_told_where_they_are_known() -> None:
    assert str(CheckpointCosts(4 * 10**12, 8 * 10**12)).endswith("12 TB (weights 4 TB, AdamW's moments 8 TB)")
    costs = CheckpointCosts(4 * 10**12, 8 * 10**12, bandwidth=300e9, mtbf=2.0)
    # sqrt(2 * 40 * 7200)
    assert costs.seconds == 40 and costs.interval_seconds == pytest.approx(758.947)
    assert str(costs).endswith(
        "40 s at 300 GB/s; if training waits for it and fails every 2 h, save every 12.6 min"
    )


def test_show_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", *GPT, "--t", "2", "--storage-bandwidth", "0.001", "--mtbf", "3"]) == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Checkpoint: ")]
    assert "ms at 1 MB/s" in line and "fails every 3 h" in line
    assert main(["show", *GPT, "--json", "--storage-bandwidth", "2"]) == 0
    record = json.loads(capsys.readouterr().out)["checkpoint"]
    assert record["seconds"] == record["total_bytes"] / 2e9 and record["interval_seconds"] is None


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--mtbf 3", "--mtbf: needs the time of a save"),
        ("--storage-bandwidth 0", "--storage-bandwidth 0: must be positive"),
        ("--storage-bandwidth 1 --mtbf nan", "--mtbf nan: must be positive"),
    ],
)
def test_what_is_no_bandwidth(words: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", *GPT, *words.split()]) == 2
    assert told in capsys.readouterr().err
