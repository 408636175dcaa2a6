"""Training scripts that know nothing of AutoPTD: plain torch, and FSDP2 under torchrun (`-m ... ours theirs`)."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from tests.parity.models import gpt
from tests.runtime.checkpoint.models import data

SETTINGS = {"lr": 1e-2, "weight_decay": 0.1}


def one_device() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = gpt(layers=2, vocab=61).double()
    return model, torch.optim.AdamW(model.parameters(), **SETTINGS)


def plain_losses(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, steps: int) -> list[float]:
    losses = []
    for step in range(first, first + steps):
        optimizer.zero_grad()
        loss = model(*data(step))[1]
        losses.append(float(loss.detach()))
        loss.backward()
        optimizer.step()
    return losses


def main(ours: str, theirs: str) -> None:
    dist.init_process_group("gloo")
    model = gpt(layers=2, vocab=61).double()
    for block in model.transformer.h:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), **SETTINGS)

    def states() -> dict[str, object]:
        values, state = get_state_dict(model, optimizer)
        return {"model": values, "optimizer": state}

    loaded = states()
    dcp.load(loaded, checkpoint_id=ours)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=loaded["model"],  # type: ignore[arg-type]
        optim_state_dict=loaded["optimizer"],  # type: ignore[arg-type]
    )
    for step in range(3):
        if step == 0:
            dcp.save(states(), checkpoint_id=theirs)
        for loss in plain_losses(model, optimizer, 2 + step, 1):
            if dist.get_rank() == 0:
                print("loss", loss, flush=True)
    dist.destroy_process_group()
    # On a busy machine torch's own threads may outlive the interpreter, which C++ ends by an abort.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
