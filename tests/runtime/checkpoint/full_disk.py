"""Run by `test_full_disk.py` with a folder on a disk on which one checkpoint has room, and two have not.

Prints one JSON line: what was raised, what was in the folder afterwards, and whether the state of the first save came back.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import autoptd
from autoptd.errors import AutoptdError
from tests.runtime.checkpoint.models import assert_same, state_of

# Of float32, with two moments: 12 MB.
SIZE = 1000


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).square().mean()


def running() -> tuple[autoptd.ParallelModel, torch.optim.Optimizer]:
    pm = autoptd.parallelize(Wide(), d=2, backend="local", example_inputs=(torch.ones(4, SIZE),), timeout=30)
    return pm, pm.optimizer(torch.optim.AdamW, lr=1e-2)


def one_step(pm: autoptd.ParallelModel, opt: torch.optim.Optimizer) -> None:
    pm.step(torch.ones(4, SIZE))
    opt.step()
    opt.zero_grad()


def error_of(act: Any, *args: Any, **keywords: Any) -> str:
    try:
        act(*args, **keywords)
    except AutoptdError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main(folder: Path) -> None:
    pm, opt = running()
    errors, names = [], []
    with pm.checkpointer(folder, opt, every=1) as ckpt:
        one_step(pm, opt)
        ckpt.save()
        first = state_of(pm, opt)
        one_step(pm, opt)
        errors.append(error_of(ckpt.save))
        names.append(sorted(os.listdir(folder)))
        # Nor is there room to replace it: the one that is there is removed behind that.
        pm.steps = 1
        errors.append(error_of(ckpt.save))
        names.append(sorted(os.listdir(folder)))
        errors.append(error_of(pm.save, folder / "other", optimizer=opt))
        names.append(sorted(os.listdir(folder)))
    pm.close()
    again, others = running()
    with again.checkpointer(folder, others, every=100) as ckpt:
        path = ckpt.resume()
        assert_same(state_of(again, others), first)
        names.append(sorted(os.listdir(folder)))
    again.close()
    print(json.dumps({"errors": errors, "names": names, "resumed": path and path.name}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
