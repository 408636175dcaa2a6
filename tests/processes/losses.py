"""Run by `test_processes.py` over gloo, at d = 2 on 2 ranks, and t = 2 as well on 4: DPO in halves, a masked loss, and two that
mix rows, next to one device; and buffers that a forward updates.

In: "few" or "more". Rank 0 prints one JSON line: the largest difference of losses and gradients, by loss.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter

import torch

import autoptd
from autoptd.program.calls import expected_calls
from benchmarks.lib.loss_cases import CASES
from benchmarks.losses import MACHINE
from tests.parity.buffers import Norm, Router, Updating, batches, make

MIXING = ("contrastive", "load_balancing")
# By the word that the script is run with.
LOSSES = {
    "few": ("contrastive",),
    "more": ("contrastive", "dpo_halves", "grpo_masked", "entropy_bonus", "load_balancing"),
}
UPDATING: dict[str, tuple[type[Updating], ...]] = {"few": (), "more": (Router, Norm)}


def worst(name: str) -> float:
    """The largest difference of the loss and of its gradients, in three steps."""
    case = CASES[name]
    call = {key: x.double() if x.is_floating_point() else x for key, x in case.call().items()}
    reference = case.make().double()
    microbatches = 1 if name in MIXING else 2
    mesh = {"t": int(os.environ["WORLD_SIZE"]) // 2, "d": 2, "num_microbatches": microbatches}
    pm = autoptd.parallelize(case.make().double(), **mesh, machine=MACHINE, example_inputs=call)
    ours = pm.optimizer(torch.optim.SGD, lr=1e-3)
    theirs = torch.optim.SGD(reference.parameters(), lr=1e-3)
    largest = 0.0
    for step in range(3):
        rolled = {key: x.roll(step, 0) for key, x in call.items()}
        wanted = reference(**rolled)
        wanted.backward()
        share = pm.local_batch(**rolled)
        with pm.record() as record:
            loss = pm.step(**share)
        executed = Counter(record.collectives)
        expected = expected_calls(pm.program, torch.distributed.get_rank())
        if step and executed != expected:
            raise RuntimeError(f"missing are {expected - executed}, too many {executed - expected}")
        largest = max(largest, abs(float(loss - wanted)) / abs(float(wanted)))
        gradients = pm.gradients()
        for key, p in reference.named_parameters() if gradients else ():
            if p.grad is not None:
                scale = max(float(p.grad.abs().max()), 1e-3)
                largest = max(largest, float((gradients[key] - p.grad).abs().max()) / scale)
        for each in (ours, theirs):
            each.step()
            each.zero_grad()
    pm.close()
    return largest


def worst_buffer(kind: type[Updating]) -> float:
    """The largest difference of buffers, in two steps with an evaluation between them."""
    first, second = batches(2)
    reference = make(kind)
    microbatches = 1 if kind is Norm else 2
    pm = autoptd.parallelize(make(kind), p=2, d=2, num_microbatches=microbatches, example_inputs=first)
    for call in (first, second):
        reference(*call)
        pm.step(*pm.local_batch(*call))
        pm.eval_step(*pm.local_batch(*call))
        state = pm.state_dict()
    pm.close()
    pairs = [(x.double(), reference.state_dict()[name].double()) for name, x in state.items()]
    return max((float((ours - theirs).abs().max()) for ours, theirs in pairs), default=0.0)


def main() -> None:
    word = sys.argv[1]
    found = {name: worst(name) for name in LOSSES[word]}
    found |= {kind.__name__: worst_buffer(kind) for kind in UPDATING[word]}
    if os.environ["RANK"] == "0":
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
