"""Run by `test_disagreement.py` as one of 2 ranks over gloo: rank 0 alone makes a call that all ranks make.

In: the word "more", for every such call. Every rank prints one JSON line: by mesh and call, what was raised on this rank.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import autoptd
from autoptd.model.parallel_model import ParallelModel
from tests.parity.models import batch, gpt

ROWS = {"d": 8}
Call = Callable[[ParallelModel, torch.optim.Optimizer], Any]
CALLS: dict[str, Call] = {
    "pm.save": lambda pm, _: pm.save(Path(tempfile.gettempdir()) / "never-written"),
    "state_dict": lambda pm, _: pm.state_dict(),
    "optimizer": lambda _, optimizer: optimizer.state_dict(),
    "eval_step": lambda pm, _: pm.eval_step(*pm.local_batch(*batch(4 * pm.options.d))),
    "clip_grad_norm_": lambda pm, _: pm.clip_grad_norm_(1.0),
    "gradients": lambda pm, _: pm.gradients(),
    "fingerprint": lambda pm, _: pm.fingerprint(),
    "load_state_dict": lambda pm, _: pm.load_state_dict(gpt(2).state_dict()),
    "save_pretrained": lambda pm, _: pm.save_pretrained(Path(tempfile.gettempdir()) / "never-written"),
}
MESHES: list[dict[str, int]] = [{"p": 2}, {"d": 2}, {"t": 2}]
FEW = [({"p": 2}, "pm.save"), ({"t": 2}, "state_dict")]
MORE = [(mesh, call) for mesh in MESHES for call in CALLS]


def attempt(mesh: dict[str, int], call: Call) -> str:
    pm = autoptd.parallelize(gpt(2), **mesh, example_inputs=batch(4 * mesh.get("d", 1)), timeout=60)
    optimizer = pm.optimizer(torch.optim.SGD, lr=0.1)
    try:
        for number in range(4):
            if number == 3 and torch.distributed.get_rank() == 0:
                call(pm, optimizer)
            pm.step(*pm.local_batch(*batch(4 * mesh.get("d", 1))))
            optimizer.step()
            optimizer.zero_grad()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main() -> None:
    cases = MORE if sys.argv[1:] == ["more"] else FEW
    told = {f"{call} {mesh}": attempt(mesh, CALLS[call]) for mesh, call in cases}
    print(json.dumps(told))


if __name__ == "__main__":
    torch.distributed.init_process_group("gloo")
    main()
