"""Run by `tests/test_default_device.py` as one of 2 ranks over gloo: train, save, load and evaluate, on two default devices.

Rank 0 prints one JSON line: losses, norms and a fingerprint of the parameters, of either.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

import autoptd
from tests.parity.models import batch, gpt


def numbers(folder: Path, device: str) -> list[float | str]:
    """Train two steps; one more twice, from a checkpoint; evaluate."""
    model, inputs = gpt(2).double(), batch()
    torch.set_default_device(device)
    try:
        pm = autoptd.parallelize(model, t=2, zero=1, example_inputs=inputs, timeout=60)
        share = pm.local_batch(*inputs)
        opt = pm.optimizer(torch.optim.AdamW, lr=1e-2)
        found: list[float | str] = []

        def step() -> torch.Tensor:
            loss = pm.step(*share)
            found.extend((float(loss), float(pm.clip_grad_norm_(1.0))))
            opt.step()
            opt.zero_grad()
            return loss

        with pm.checkpointer(folder, opt, every=2) as ckpt:
            for _ in range(3):
                ckpt.step(step())
        with pm.checkpointer(folder, opt, every=2) as ckpt:
            ckpt.resume()
            assert pm.steps == 2
            loss = pm.step(*share)
            assert float(loss) == found[4]
        pm.check_ranks(*inputs)
        found += [float(pm.eval_step(*share)), pm.fingerprint()]
        pm.close()
    finally:
        torch.set_default_device(None)
    return found


def main(folder: Path) -> None:
    found = {device: numbers(folder / device, device) for device in ("cpu", "meta")}
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
