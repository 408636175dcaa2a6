"""Run by `test_processes.py` as one of 2 or 8 ranks over gloo: train, save, go on; then load into new worlds, and go on there.

Rank 0 prints one JSON line: the losses of the run that went on, and those of each resumed one.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import autoptd
from autoptd.errors import PlanError, RuntimeFault
from tests.runtime.checkpoint.models import data, tied_gpt

# The mesh that saves, and others; the first one is to go on to the bit.
MESHES: dict[int, list[dict[str, Any]]] = {
    2: [{"d": 2}, {"d": 2}, {"p": 2}],
    8: [{"t": 2, "p": 2, "d": 2}, {"t": 2, "p": 2, "d": 2}, {"d": 4, "p": 2, "zero": 1, "dp_shard": 2}],
}


def running(mesh: dict[str, Any]) -> tuple[autoptd.ParallelModel, torch.optim.Optimizer]:
    pm = autoptd.parallelize(tied_gpt(), **mesh, example_inputs=data(0), timeout=60)
    return pm, pm.optimizer(torch.optim.AdamW, lr=1e-2)


def train(pm: autoptd.ParallelModel, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        losses.append(float(pm.step(*pm.local_batch(*data(pm.steps)))))
        pm.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def refused(call: Any, kind: type[Exception]) -> str:
    """The error that all ranks are to get."""
    try:
        call()
    except kind as error:
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, str(error))
        assert len(set(everyone)) == 1, everyone
        return str(error)
    raise AssertionError("was not refused")


def main(folder: Path) -> None:
    rank, meshes = int(os.environ["RANK"]), MESHES[int(os.environ["WORLD_SIZE"])]
    torch.manual_seed(rank)
    pm, optimizer = running(meshes[0])
    train(pm, optimizer, 3)
    pm.save(folder / "saved", optimizer=optimizer)
    noise = float(torch.rand(()))
    losses = [train(pm, optimizer, 4)]
    own = folder / f"{rank}"
    errors = [refused(lambda: pm.save(own), PlanError)]
    errors.append(refused(lambda: pm.load(folder / "none"), PlanError))
    errors += refused_states(pm, optimizer, rank, folder / "refused")
    damage(folder / "saved" / "__1_0.distcp", rank)
    errors.append(refused(lambda: pm.load(folder / "saved", optimizer=optimizer), RuntimeFault))
    damage(folder / "saved" / "__1_0.distcp", rank)
    pm.close()
    for mesh in meshes[1:]:
        pm, optimizer = running(mesh)
        pm.load(folder / "saved", optimizer=optimizer)
        assert float(torch.rand(())) == noise
        losses.append(train(pm, optimizer, 4))
        pm.close()
    print(json.dumps({"losses": losses, "errors": errors}), flush=True)


class Loader:
    """Its state can be asked for on all ranks but one."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def state_dict(self) -> dict[str, Any]:
        return {}["position"] if self.rank == 1 else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError


def refused_states(pm: autoptd.ParallelModel, optimizer: Any, rank: int, folder: Path) -> list[str]:
    """Two ways to save what fails on one rank; both leave nothing."""
    extra = {"loader": Loader(rank)}
    errors = [refused(lambda: pm.save(folder, optimizer=optimizer, extra=extra), PlanError)]
    with pm.checkpointer(folder, optimizer, every=100, extra=extra) as ckpt:
        errors.append(refused(ckpt.save, RuntimeFault))
    dist.barrier()
    assert os.listdir(folder) == [".lock"]
    return errors


def damage(file: Path, rank: int) -> None:
    """Flip a bit of a file, when no rank reads it."""
    dist.barrier()
    if rank == 0:
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    dist.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
