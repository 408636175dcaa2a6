"""A run that takes the ranks it is given: `d="auto"` beside t=2, checkpoints, and data by the number of the step.

In: a folder of checkpoints, and the number of the last step. Rank 0's losses by step, and the mesh, as a line of JSON.
"""

from __future__ import annotations

import json
import sys

import torch
from torch.utils.data import DataLoader, TensorDataset

import autoptd
from tests.parity.models import batch, gpt

ROWS = 16


def main(folder: str, last: int) -> None:
    data = TensorDataset(*batch(3 * ROWS))
    # In float64, with dropout, whose masks do not depend on the mesh.
    model = gpt(2, dropout=0.1).double()
    pm = autoptd.parallelize(model, t=2, d="auto", example_inputs=batch(ROWS))
    opt = pm.optimizer(torch.optim.AdamW, lr=1e-2)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 12)
    loader = DataLoader(data, batch_sampler=autoptd.Batches(data, batch=ROWS, seed=3, pm=pm))
    losses = {}
    with pm.checkpointer(folder, opt, every=2, extra={"scheduler": sched}) as ckpt:
        ckpt.resume()
        while pm.steps < last:
            for x, y in loader:
                loss = pm.step(x, y)
                pm.clip_grad_norm_(1.0)
                opt.step()
                opt.zero_grad()
                sched.step()
                losses[pm.steps] = float(loss)
                if not ckpt.step(loss) or pm.steps == last:
                    break
    degrees = {"t": pm.options.t, "d": pm.options.d}
    print(json.dumps({"losses": losses, **degrees, "m": pm.program.num_microbatches}))
    pm.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
