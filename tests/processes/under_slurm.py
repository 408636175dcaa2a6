"""A rank that srun has started: two steps of AdamW beside one device, in float64; prints the worst difference.

under_slurm.py '{"t": 2, "d": 2}'
"""

from __future__ import annotations

import json
import os
import sys

import torch

import autoptd
from tests.parity.models import batch, gpt

LAUNCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")


def main(keywords: dict[str, int]) -> None:
    call, model = batch(8), gpt(2).double()
    waits = autoptd.RankOptions(timeout=float(os.environ.get("WAITS", "60")))
    pm = autoptd.parallelize(model, **keywords, example_inputs=call, ranks=waits)
    one = gpt(2).double()
    one.load_state_dict(model.state_dict())
    optimizers = pm.optimizer(torch.optim.AdamW, lr=1e-2), torch.optim.AdamW(one.parameters(), lr=1e-2)
    worst = 0.0
    for _ in range(2):
        wanted = one(*call)[1]
        wanted.backward()
        worst = max(worst, abs(float(pm.step(*pm.local_batch(*call)) - wanted)))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    weights = pm.state_dict()
    for name, x in one.named_parameters():
        if weights:
            worst = max(worst, float((weights[name] - x).detach().abs().max()))
    found = {name: os.environ[name] for name in LAUNCH}
    print(json.dumps({"worst": worst, "launch": found, "port": os.environ["MASTER_PORT"]}))
    pm.close()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
