"""Run by `test_whole.py` as one of 2 or 4 ranks over gloo: train with Muon and AdamW, save, load on another mesh, and go on.

Each rank prints one JSON line: on rank 0, how far parameters and momentum are from those of one device; then those of the
resumed run.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

import autoptd
from autoptd.errors import PlanError
from autoptd.model.parallel_model import ParallelModel
from tests.runtime.checkpoint.models import data, tied_gpt
from tests.runtime.params.test_whole import Optimizers, Positional, mixed

# The mesh that saves, and the one that loads.
MESHES: dict[int, list[dict[str, Any]]] = {
    2: [{"d": 2, "zero": 1}, {"t": 2}],
    4: [{"t": 2, "d": 2, "zero": 1}, {"p": 2, "t": 2}],
}


def train(pm: ParallelModel, optimizers: Optimizers, steps: int) -> None:
    for _ in range(steps):
        pm.step(*pm.local_batch(*data(pm.steps)))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def one_device(steps: int) -> dict[str, torch.Tensor]:
    model = tied_gpt()
    optimizers = mixed(model)
    for step in range(steps):
        model(*data(step))[1].backward()
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
    names = {x: name for name, x in model.named_parameters()}
    momentum = {names[x]: state["momentum_buffer"] for x, state in optimizers[0].state.items()}
    return {**dict(model.named_parameters()), **{f"momentum of {name}": x for name, x in momentum.items()}}


def values(pm: ParallelModel, optimizers: Optimizers) -> dict[str, torch.Tensor]:
    found, state = pm.state_dict(), optimizers[0].state_dict()
    for name, record in state.get("state", {}).items():
        found[f"momentum of {name}"] = record["momentum_buffer"]
    return found


def distances(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> list[float]:
    return [float((some[name] - x).abs().max()) for name, x in others.items()]


def is_refused(pm: ParallelModel) -> bool:
    """On all ranks, and at once."""
    try:
        pm.optimizer(Positional, ["*.c_fc.weight", "*.c_proj.weight"], lr=0.1)
    except PlanError as error:
        return "its constructor makes" in str(error)
    return False


def main(folder: Path) -> None:
    first, second = MESHES[int(os.environ["WORLD_SIZE"])]
    pm = autoptd.parallelize(tied_gpt(), **first, example_inputs=data(0), timeout=60)
    optimizers = mixed(pm)
    train(pm, optimizers, 2)
    pm.save(folder / "saved", optimizers)
    train(pm, optimizers, 2)
    went_on = values(pm, optimizers)
    refused = is_refused(pm)
    pm.close()
    pm = autoptd.parallelize(tied_gpt(), **second, example_inputs=data(0), timeout=60)
    optimizers = mixed(pm)
    pm.load(folder / "saved", optimizers)
    train(pm, optimizers, 2)
    resumed = values(pm, optimizers)
    # Other ranks have no full values.
    expected = one_device(4) if went_on else {}
    error, again = (max(distances(found, expected), default=0.0) for found in (went_on, resumed))
    print(json.dumps({"error": error, "resumed": again, "refused": refused}))
    pm.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
