"""Ray Train starts the workers: one dies, the run goes on from the last report, and then on half the workers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.parity.models import batch, gpt

pytest.importorskip("ray.train.torch")
pytestmark = [pytest.mark.thorough, pytest.mark.processes]

ROOT = Path(__file__).parents[2]


def test_a_run_goes_on_after_a_worker_died_and_on_fewer(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    command = [sys.executable, str(Path(__file__).parent / "ray_loop.py"), str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout.splitlines()[-1]) == [6, 8]

    lines = [json.loads(line) for line in (tmp_path / "losses.jsonl").read_text().splitlines()]
    found = [(one["step"], one["d"], one["resumed"]) for one in lines]
    # The third step had not been reported, and is repeated.
    assert found == [
        *((step, 2, False) for step in (1, 2, 3)),
        *((step, 2, True) for step in (3, 4, 5, 6)),
        *((step, 1, True) for step in (7, 8)),
    ]
    one, call = gpt(2).double(), batch(8)
    opt = torch.optim.AdamW(one.parameters(), lr=1e-2)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 12)
    wanted = {}
    for step in range(1, 9):
        loss = one(*call)[1]
        loss.backward()
        opt.step()
        opt.zero_grad()
        sched.step()
        wanted[step] = loss.item()
    assert max(abs(one["loss"] - wanted[one["step"]]) for one in lines) <= 1e-9
    # What was handed over is not left in the folder in between.
    assert list((tmp_path / "staging").iterdir()) == []
