"""Run by `test_processes.py` over gloo: models that train beside one device, one world after the other.

In: names of `CASES`, or of classes in `UPDATING`. Ranks print one JSON line: for each the largest difference of losses, norms,
gradients and parameters (or buffers), and which collectives ran over which axes.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import autoptd
from autoptd.ir.machine import Machine
from autoptd.program.calls import expected_calls
from benchmarks.lib.loss_cases import CASES as LOSSES
from benchmarks.losses import MACHINE
from tests.hostile.test_shared_blocks import batch as shared_batch
from tests.hostile.test_shared_blocks import repeated
from tests.parity.buffers import Norm, Router, Updating, batches, make
from tests.parity.models import batch, gpt, uneven
from tests.parity.rotary import llama
from tests.parity.test_sharing import grouped, request

# Its values are changed through `optimizer.param_groups`, where some ranks have none of them.
CLAMPED = "transformer.h.1.mlp.c_proj.weight"


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    call: Any
    mesh: dict[str, Any]


def loss(name: str, t: int = 2, m: int = 2) -> Case:
    mesh = {"t": t, "d": 2, "num_microbatches": m, "machine": MACHINE}
    return Case(LOSSES[name].make, LOSSES[name].call(), mesh)


def shared(**mesh: Any) -> Case:
    """A sharded update."""
    return Case(lambda: gpt(2), batch(8), {**mesh, "zero": 1})


CASES: dict[str, Case] = {
    "contrastive of 2": loss("contrastive", t=1, m=1),
    "contrastive": loss("contrastive", m=1),
    "load_balancing": loss("load_balancing", m=1),
    **{name: loss(name) for name in ("dpo_halves", "grpo_masked", "entropy_bonus")},
    # With a sum over tp after the reduce-scatter; over cp, too; alone; over half of the replicas, and a sum over the others.
    "shared, t": shared(t=2, d=2),
    "shared, c": shared(c=2, d=2, context="ulysses"),
    "shared, p": shared(p=2, d=2),
    "shared, half": shared(d=4, dp_shard=2),
    # The groups of sub-axes are made by all ranks in one order.
    "kv heads": Case(grouped, batch(), {key: x for key, x in request(4).items() if key != "example_inputs"}),
    # A block that is repeated: its parameters are read several times in a stage, at other places by each rank.
    "albert": Case(
        lambda: repeated(), shared_batch(), {"t": 2, "p": 2, "num_microbatches": 3, "machine": Machine()}
    ),
    "tokens": Case(
        lambda: llama(2), (batch()[0], uneven(batch()[1])), {"c": 2, "d": 2, "context": "ulysses"}
    ),
}
UPDATING: dict[str, type[Updating]] = {"Router": Router, "Norm": Norm}


def compare(case: Case) -> dict[str, Any]:
    """Three clipped steps; RuntimeError where other collectives run than the program says."""
    call = case.call if isinstance(case.call, dict) else dict(enumerate(case.call))
    call = {key: x.double() if x.is_floating_point() else x for key, x in call.items()}
    positional = not isinstance(case.call, dict)
    model, reference = case.make().double(), case.make().double()
    example = tuple(call.values()) if positional else call
    pm = autoptd.parallelize(model, **case.mesh, example_inputs=example, timeout=120)
    ours = pm.optimizer(torch.optim.AdamW, *groups_of(pm), lr=1e-2, eps=1e-3)
    theirs = torch.optim.AdamW(reference.parameters(), lr=1e-2, eps=1e-3)
    worst = dict.fromkeys(("loss", "norm", "gradient", "parameter"), 0.0)

    def differ(what: str, found: Any, wanted: Any, floor: float = 1e-3) -> None:
        scale = max(float(torch.as_tensor(wanted).detach().abs().max()), floor)
        worst[what] = max(worst[what], float((found - wanted).detach().abs().max()) / scale)

    for step in range(3):
        rolled = {key: x.roll(step, 0) for key, x in call.items()}
        args, kwargs = (tuple(rolled.values()), {}) if positional else ((), rolled)
        made = reference(*args, **kwargs)
        wanted = made[-1] if isinstance(made, tuple) else made
        wanted.backward()
        share = pm.local_batch(*args, **kwargs)
        with pm.record() as record:
            found = pm.step(*share) if positional else pm.step(**share)
        executed = Counter(made for made in record.collectives if made.kind != "objects")
        expected = expected_calls(pm.program, torch.distributed.get_rank())
        if executed != expected:
            raise RuntimeError(f"missing are {expected - executed}, too many {executed - expected}")
        differ("loss", found, wanted)
        gradients = pm.gradients()
        for name, p in reference.named_parameters() if gradients else ():
            if p.grad is not None:
                differ("gradient", gradients[name], p.grad)
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        differ("norm", pm.clip_grad_norm_(0.5), norm)
        ours.step(), theirs.step()
        with torch.no_grad():
            for p in [
                p for group in ours.param_groups if group.get("name") == "clamped" for p in group["params"]
            ]:
                p.clamp_(-0.01, 0.01)
            for name, p in reference.named_parameters():
                if name == CLAMPED:
                    p.clamp_(-0.01, 0.01)
        ours.zero_grad(), theirs.zero_grad()
    state = pm.state_dict()
    for name, p in reference.named_parameters() if state else ():
        differ("parameter", state[name], p)
    pm.close()
    return {**worst, "calls": sorted({f"{call.kind} over {call.axis}" for call in record.collectives})}


def groups_of(pm: autoptd.ParallelModel) -> list[Any]:
    """The groups of an optimizer, where one of its parameters is to be clamped."""
    names = [x.name for x in pm.program.params]
    if CLAMPED not in names:
        return []
    others = [name for name in names if name != CLAMPED]
    return [[{"params": [CLAMPED], "name": "clamped"}, {"params": others, "name": "others"}]]


def compare_buffers(kind: type[Updating]) -> dict[str, Any]:
    """Two steps with an evaluation between them."""
    first, second = batches(2)
    reference = make(kind)
    m = 1 if kind is Norm else 2
    pm = autoptd.parallelize(make(kind), p=2, d=2, num_microbatches=m, example_inputs=first)
    for call in (first, second):
        reference(*call)
        pm.step(*pm.local_batch(*call))
        pm.eval_step(*pm.local_batch(*call))
        state = pm.state_dict()
    pm.close()
    pairs = [(x.double(), reference.state_dict()[name].double()) for name, x in state.items()]
    return {"buffer": max((float((ours - theirs).abs().max()) for ours, theirs in pairs), default=0.0)}


def main(names: list[str]) -> None:
    found = {}
    for name in names:
        found[name] = compare_buffers(UPDATING[name]) if name in UPDATING else compare(CASES[name])
    # Each world has taken its process group with it.
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
