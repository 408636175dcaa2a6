"""Run by `test_processes.py` as one of 8 ranks over gloo: train (t, p, d, v) = (2, 2, 2, 2), scattered, beside one device.

Rank 0 prints one JSON line: the largest differences, and whether a saved and loaded model gives the same next loss.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import torch

import autoptd
from autoptd.model.parallel_model import ParallelModel
from autoptd.program.calls import expected_calls
from autoptd.runtime.folders.read_folder import open_folder
from tests.parity.models import batch, gpt, uneven

MESH = {"t": 2, "p": 2, "d": 2, "v": 2, "p2p": "scatter_gather", "recompute": "full:1/2"}


def main(folder: Path) -> None:
    model = gpt().double()
    ids, targets = batch(16)
    targets = uneven(targets).masked_fill(targets == -1, -100)
    reference = gpt().double()
    theirs = torch.optim.AdamW(reference.parameters(), lr=1e-3)
    if torch.distributed.is_initialized():
        raise RuntimeError("parallelize is to make the process group")
    pm = autoptd.parallelize(model, **MESH, example_inputs=(ids, targets), timeout=120)
    ours = pm.optimizer(torch.optim.AdamW, lr=1e-3)
    worst = {"loss": 0.0, "gradient": 0.0, "parameter": 0.0, "norm": 0.0}
    for step in range(5):
        x, y = ids.roll(step, 0), targets.roll(step, 0)
        wanted = reference(x, y)[1]
        wanted.backward()
        loss = pm.step(*pm.local_batch(x, y))
        worst["loss"] = max(worst["loss"], abs(float(loss - wanted)) / abs(float(wanted)))
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        worst["norm"] = max(worst["norm"], abs(float(pm.clip_grad_norm_(0.5) / norm) - 1))
        gradients = pm.gradients()
        grads = {name: p.grad for name, p in reference.named_parameters()}
        largest = max(float(g.abs().max()) for g in grads.values())
        for name, g in grads.items() if gradients else ():
            scale = max(float(g.abs().max()), 1e-3 * largest)
            worst["gradient"] = max(worst["gradient"], float((gradients[name] - g).abs().max()) / scale)
        theirs.step()
        theirs.zero_grad()
        ours.step()
        ours.zero_grad()
        state = pm.state_dict()
        for name, p in reference.named_parameters() if state else ():
            scale = max(float(p.abs().max()), 1e-3)
            worst["parameter"] = max(worst["parameter"], float((state[name] - p).abs().max()) / scale)
    share = pm.local_batch(ids, targets)
    with pm.record() as record:
        pm.step(*share)
    if Counter(record.collectives) != expected_calls(pm.program, torch.distributed.get_rank()):
        raise RuntimeError(f"executed were {record.collectives}")
    ours.zero_grad()
    again = save_and_load(pm, ours, share, folder)
    again["pretrained"] = save_and_load_pretrained(pm, share, folder / "pretrained")
    pm.close()
    print(json.dumps({"worst": worst, **again}), flush=True)


def save_and_load(
    pm: autoptd.ParallelModel, optimizer: torch.optim.Optimizer, share: tuple[torch.Tensor, ...], folder: Path
) -> dict[str, float | bool]:
    """Save weights and optimizer, go on for two steps; load them into a changed model and go on for the same two steps."""
    saved, moments = pm.state_dict(), optimizer.state_dict()
    if torch.distributed.get_rank() == 0:
        torch.save({"model": saved, "optimizer": moments}, folder / "checkpoint.pt")
    evaluated = pm.eval_step(*share)
    first = [two_steps(pm, optimizer, share)]
    torch.distributed.barrier()
    loaded = torch.load(folder / "checkpoint.pt", weights_only=True)
    pm.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    first.append(two_steps(pm, optimizer, share))
    return {"identical": first[0] == first[1], "eval_equals_step": float(evaluated) == first[0][0]}


def save_and_load_pretrained(
    pm: autoptd.ParallelModel, share: tuple[torch.Tensor, ...], folder: Path
) -> bool:
    """Whether ranks that read their parts of what was saved, and have no other values, give the same loss."""
    pm.save_pretrained(folder, max_shard_size="20KB")
    empty = {name: x.to("meta") for name, x in gpt().state_dict().items()}
    other = ParallelModel(pm.program, pm.options, empty, weights=open_folder(folder))
    return float(other.eval_step(*share)) == float(pm.eval_step(*share))


def two_steps(
    pm: autoptd.ParallelModel, optimizer: torch.optim.Optimizer, share: tuple[torch.Tensor, ...]
) -> list[float]:
    losses = []
    for _ in range(2):
        losses.append(float(pm.step(*share)))
        optimizer.step()
        optimizer.zero_grad()
    return losses


if __name__ == "__main__":
    main(Path(sys.argv[1]))
