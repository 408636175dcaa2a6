"""Run by `test_processes.py` as one of several ranks over gloo: a Trainer that saves, another that resumes.

In: the mesh as JSON, and a folder. Prints one JSON line: logs of both runs, whether this process has the trained weights
in `trainer.model`, and what was refused.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from autoptd.errors import AutoptdError
from autoptd.integrations.transformers import Trainer
from tests.integrations.runs import Rows, arguments, gpt2, in_float64, logs_of

HOW: dict[str, Any] = {"max_steps": 4, "gradient_accumulation_steps": 2, "save_strategy": "steps"}
HOW |= {"save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}


def trainer(mesh: dict[str, int], folder: Path, data: Any = None, **others: Any) -> Trainer:
    args = arguments(folder, 2, **{**HOW, "ddp_backend": "gloo", **others})
    data = data or Rows(21)
    given = {"train_dataset": data, "eval_dataset": Rows(5, seed=3), "compute_metrics": metrics}
    return Trainer(in_float64(gpt2()), args, **given, parallel=mesh)


def metrics(found: Any) -> dict[str, float]:
    """Numbers that depend on every entry of predictions and labels, and on their places."""
    places = np.arange(found.predictions.size).reshape(found.predictions.shape)
    return {"weighed": float((found.predictions * np.cos(places)).mean()), "sum": int(found.label_ids.sum())}


def main(mesh: dict[str, int], folder: Path) -> None:
    # Otherwise accelerate starts threads of OpenMP, which a forked process cannot.
    os.environ["OMP_NUM_THREADS"] = "1"
    first = trainer(mesh, folder)
    first.train()
    first.save_model(str(folder / "final"))
    # All have it, not only rank 0.
    sums = torch.stack([x.double().sum() for x in first.model.state_dict().values()])
    highest, lowest = sums.clone(), sums.clone()
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    dist.all_reduce(lowest, dist.ReduceOp.MIN)
    if os.environ["RANK"] == "0":
        shutil.rmtree(folder / "checkpoint-4")
    dist.barrier()
    second = trainer(mesh, folder)
    second.train(resume_from_checkpoint=True)
    logs = logs_of(second)
    # All processes set the same weights; then one of them alone.
    edited = []
    for ranks in ((0, 1, 2, 3), (1,)):
        if int(os.environ["RANK"]) in ranks:
            with torch.no_grad():
                second.model.transformer.ln_f.weight.mul_(0.5)
        try:
            edited.append(str(second.evaluate()["eval_loss"]))
        except AutoptdError as error:
            edited.append(str(error))
    said = ""
    try:
        trainer(mesh, folder, Rows(21, seed=int(os.environ["RANK"]))).train()
    except AutoptdError as error:
        said = str(error)
    found = {
        "logs": logs_of(first),
        "resumed": logs,
        "edited": edited,
        "is_same": torch.equal(highest, lowest),
        "said": said,
    }
    print(json.dumps(found), flush=True)
    dist.barrier()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
