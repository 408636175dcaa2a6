"""Run by `test_processes.py` as one of 4 ranks over gloo: several worlds, one after the other, that shard the update.

In: the word "more", for more of them. Rank 0 prints one JSON line: per mesh, the largest difference of a parameter from one
device's after three clipped steps.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from typing import Any

import torch
from torch import Tensor

import autoptd
from autoptd.program.calls import expected_calls
from tests.parity.models import batch, gpt

# With a sum over tp behind the reduce-scatter; over cp, too; alone; over half of the replicas, with a sum over the other half.
FEW: list[dict[str, Any]] = [{"t": 2, "d": 2}, {"c": 2, "d": 2, "context": "ulysses"}]
MORE: list[dict[str, Any]] = [*FEW, {"p": 2, "d": 2}, {"d": 4, "dp_shard": 2}]
STEPS = 3
# Its values are changed through `optimizer.param_groups`, where some ranks have none of them.
CLAMPED = "transformer.h.1.mlp.c_proj.weight"


def main() -> None:
    expected = one_device()
    found = [largest_difference(mesh, expected) for mesh in (MORE if sys.argv[1:] == ["more"] else FEW)]
    # Each world has taken its process group with it.
    if os.environ["RANK"] == "0":
        print(json.dumps(found), flush=True)


def one_device() -> dict[str, Tensor]:
    model, data = gpt(2).double(), batch(8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(STEPS):
        model(*data)[-1].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        with torch.no_grad():
            model.get_parameter(CLAMPED).clamp_(-0.01, 0.01)
        optimizer.zero_grad()
    return dict(model.state_dict())


def largest_difference(mesh: dict[str, Any], expected: dict[str, Tensor]) -> float:
    data = batch(8)
    pm = autoptd.parallelize(gpt(2).double(), **mesh, zero=1, example_inputs=data, timeout=120)
    others = [name for name in expected if name != CLAMPED and name in {x.name for x in pm.program.params}]
    groups = [{"params": [CLAMPED], "name": "clamped"}, {"params": others, "name": "others"}]
    optimizer = pm.optimizer(torch.optim.AdamW, groups, lr=1e-2)
    share = pm.local_batch(*data)
    for _ in range(STEPS):
        with pm.record() as record:
            pm.step(*share)
        calls = Counter(call for call in record.collectives if call.kind != "objects")
        if calls != expected_calls(pm.program, torch.distributed.get_rank()):
            raise RuntimeError(f"executed were {record.collectives}")
        pm.clip_grad_norm_(0.5)
        optimizer.step()
        clamp(optimizer)
        optimizer.zero_grad()
    # Of rank 0; the others get nothing.
    state = pm.state_dict()
    worst = max((float((state[name] - x).abs().max()) for name, x in expected.items() if state), default=0.0)
    pm.close()
    return worst


@torch.no_grad()
def clamp(optimizer: Any) -> None:
    for group in optimizer.param_groups:
        if group["name"] == "clamped":
            for p in group["params"]:
                p.clamp_(-0.01, 0.01)


if __name__ == "__main__":
    main()
