"""Run by `test_processes.py` as one of 4 ranks over gloo: 2 KV heads on t = 4, beside one device.

Rank 0 prints one JSON line: the largest differences.
"""

from __future__ import annotations

import json

import torch

import autoptd
from tests.parity.models import batch
from tests.parity.test_sharing import grouped, request
from tests.processes.beside_one_device import differences


def main() -> None:
    model, reference = grouped().double(), grouped().double()
    inputs = batch()
    pm = autoptd.parallelize(model, **request(4), timeout=120)
    worst, calls = differences(pm, reference, inputs, inputs)
    axes = sorted({call.axis for call in calls})
    rank = torch.distributed.get_rank()
    pm.close()
    if rank == 0:
        print(json.dumps({"worst": worst, "axes": axes}), flush=True)


if __name__ == "__main__":
    main()
