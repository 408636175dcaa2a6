"""Run by `test_processes.py` as one of 4 ranks over gloo: c = 2 beside d = 2, beside one device.

Rank 0 prints one JSON line: the largest differences.
"""

from __future__ import annotations

import json
from collections import Counter

import torch

import autoptd
from autoptd.program.calls import expected_calls
from tests.parity.models import batch, uneven
from tests.parity.rotary import llama


def main() -> None:
    model, reference = llama(2).double(), llama(2).double()
    ids, labels = batch()
    inputs = ids, uneven(labels)
    pm = autoptd.parallelize(model, c=2, d=2, example_inputs=inputs, timeout=120)
    mine = pm.local_batch(*inputs)
    ours, theirs = pm.optimizer(torch.optim.SGD, lr=0.1), torch.optim.SGD(reference.parameters(), lr=0.1)
    worst = {"loss": 0.0, "norm": 0.0, "parameter": 0.0}
    for _ in range(3):
        wanted = reference(*inputs)
        wanted.backward()
        with pm.record() as record:
            loss = pm.step(*mine)
        if Counter(record.collectives) != expected_calls(pm.program, torch.distributed.get_rank()):
            raise RuntimeError(f"executed were {record.collectives}")
        worst["loss"] = max(worst["loss"], abs(float(loss - wanted)))
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        worst["norm"] = max(worst["norm"], abs(float(pm.clip_grad_norm_(0.5) - norm)))
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    state = pm.state_dict()
    for name, p in reference.named_parameters() if state else ():
        worst["parameter"] = max(worst["parameter"], float((state[name] - p).abs().max()))
    kinds = sorted({f"{call.kind} over {call.axis}" for call in record.collectives})
    rank = torch.distributed.get_rank()
    pm.close()
    if rank == 0:
        print(json.dumps({"worst": worst, "kinds": kinds}), flush=True)


if __name__ == "__main__":
    main()
