"""Run by `tests/hostile/test_shared_blocks.py` as one of the ranks over gloo: a block used four times, beside one device.

Every rank prints the largest difference of the losses of three steps.
"""

from __future__ import annotations

import sys

import torch

import autoptd
from tests.hostile.test_shared_blocks import MODELS, batch


def main(t: int, p: int, d: int) -> None:
    torch.manual_seed(0)
    model = MODELS["albert"]().double()
    x, y = batch()
    share = tuple(one[: len(one) // d] for one in (x, y))
    pm = autoptd.parallelize(model, t=t, p=p, d=d, num_microbatches=3, example_inputs=share, timeout=60)
    ours, theirs = pm.optimizer(torch.optim.AdamW, lr=1e-2), torch.optim.AdamW(model.parameters(), lr=1e-2)
    worst = 0.0
    for _ in range(3):
        wanted = model(x, y)
        wanted.backward()
        loss = pm.step(*pm.local_batch(x, y))
        worst = max(worst, abs(float(loss) - float(wanted.detach())))
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    pm.close()
    print(worst, flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
