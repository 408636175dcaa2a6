"""Run by `test_pace.py` as one of 2 ranks over gloo, whose clock runs as no other's: train, and save by every="auto".

Each rank prints one JSON line: the steps that it has saved, and the interval that it would choose.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from unittest import mock

import torch

import autoptd
from autoptd.model import checkpointer as module
from autoptd.runtime.checkpoint.pace import FIRST_STEPS, Pace
from tests.runtime.checkpoint.models import data, tied_gpt


def main(folder: Path) -> None:
    speed = 1.0 + 9.0 * int(os.environ["RANK"])
    pace = Pace("auto", 1e-4, lambda: speed * time.monotonic())
    pm = autoptd.parallelize(tied_gpt(), d=2, example_inputs=data(0), timeout=60)
    optimizer = pm.optimizer(torch.optim.AdamW, lr=1e-2)
    saved: list[int] = []
    with (
        mock.patch.object(module, "checked_pace", lambda *_: pace),
        pm.checkpointer(folder, optimizer, every="auto", mtbf=1e-4, keep=2) as ckpt,
    ):
        while pm.steps < 40 * FIRST_STEPS and len(saved) < 3:
            loss = pm.step(*pm.local_batch(*data(pm.steps)))
            optimizer.step()
            optimizer.zero_grad()
            count = ckpt._count
            ckpt.step(loss)
            if ckpt._count > count:
                saved.append(pm.steps)
    print(json.dumps({"saved": saved, "interval": pace.interval}), flush=True)
    pm.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
