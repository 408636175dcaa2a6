"""Run by `test_processes.py` as one of 4 ranks over gloo: c = 2 beside d = 2, beside one device.

Rank 0 prints one JSON line: the largest differences.
"""

from __future__ import annotations

import json

import torch

import autoptd
from tests.parity.models import batch, uneven
from tests.parity.rotary import llama
from tests.processes.beside_one_device import differences


def main() -> None:
    model, reference = llama(2).double(), llama(2).double()
    ids, labels = batch()
    inputs = ids, uneven(labels)
    pm = autoptd.parallelize(model, c=2, d=2, context="ulysses", example_inputs=inputs, timeout=120)
    mine = pm.local_batch(*inputs)
    worst, calls = differences(pm, reference, inputs, mine)
    kinds = sorted({f"{call.kind} over {call.axis}" for call in calls})
    rank = torch.distributed.get_rank()
    pm.close()
    if rank == 0:
        print(json.dumps({"worst": worst, "kinds": kinds}), flush=True)


if __name__ == "__main__":
    main()
