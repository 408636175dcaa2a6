"""Run by `test_disagreement.py` as one of 4 ranks over gloo: ranks that read other data, or change other things, than they
should.

In: the word "more", for other situations. Every rank prints one JSON line: for each what was raised, or "" for nothing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import autoptd
from autoptd.model.parallel_model import ParallelModel
from tests.parity.models import batch, gpt

Situation = Callable[[ParallelModel, int, Callable[[], Any]], None]


def attempt(mesh: dict[str, int], situation: Situation) -> str:
    """What was raised; the optimizer's state afterwards is nobody's."""
    pm = autoptd.parallelize(gpt(2), **mesh, example_inputs=batch(4 * mesh.get("d", 1)), timeout=60)
    optimizer = pm.optimizer(torch.optim.SGD, lr=0.1)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    try:
        situation(pm, torch.distributed.get_rank(), update)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def same_seed(pm: ParallelModel, rank: int, update: Callable[[], Any]) -> None:
    for _ in range(4):
        pm.step(*batch(4))
        pm.clip_grad_norm_(1.0)
        update()
    pm.eval_step(*pm.local_batch(*batch(8)))  # another size than training's


def seeded_by_rank(pm: ParallelModel, rank: int, update: Callable[[], Any]) -> None:
    torch.manual_seed(1337 + rank)
    ids = torch.randint(0, 60, batch(4)[0].shape)
    pm.step(ids, ids)


def evaluated_by_rank(pm: ParallelModel, rank: int, update: Callable[[], Any]) -> None:
    pm.step(*batch(4))
    torch.manual_seed(1337 + rank)
    ids = torch.randint(0, 60, batch(4)[0].shape)
    pm.eval_step(ids, ids)


def loaded_by_rank(pm: ParallelModel, rank: int, update: Callable[[], Any]) -> None:
    state = gpt(2).state_dict()
    pm.load_state_dict(state)
    pm.load_state_dict(
        {name: x + (name == "transformer.wpe.weight" and rank == 3) for name, x in state.items()}
    )


def sampled(pm: ParallelModel, update: Callable[[], Any], **sampler: int) -> None:
    data = TensorDataset(*(torch.cat([x + i for i in range(8)]) % 60 for x in batch(4)))
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, shuffle=False, **sampler))
    for ids, targets in loader:
        pm.step(ids, targets)
        update()


def sampler_over_all_ranks(pm: ParallelModel, rank: int, update: Callable[[], Any]) -> None:
    sampled(pm, update)


def sampler_over_replicas(pm: ParallelModel, rank: int, update: Callable[[], Any]) -> None:
    sampled(pm, update, num_replicas=pm.options.d, rank=pm.coordinate.dp)


def one_gradient_changed(pm: ParallelModel, rank: int, update: Callable[[], Any]) -> None:
    pm.step(*batch(4))
    if rank == 1:
        for parameter in pm.parameters():
            parameter.grad.mul_(0.5)
    update()
    pm.step(*batch(4))


def torch_clips(pm: ParallelModel, rank: int, update: Callable[[], Any]) -> None:
    pm.step(*batch(4))
    torch.nn.utils.clip_grad_norm_(pm.parameters(), 1.0)


def computed_wrongly(pm: ParallelModel, rank: int, update: Callable[[], Any]) -> None:
    pm.check_ranks(*batch(8))
    if rank == 3:
        pm.rank_parameters(rank)["transformer.wpe.weight"].data.mul_(2)
    pm.check_ranks(*batch(8))


def checked_by_rank(pm: ParallelModel, rank: int, update: Callable[[], Any]) -> None:
    pm.check_ranks(*(x.roll(rank, 0) for x in batch(8)))


PIPELINE, REPLICAS = {"t": 2, "p": 2}, {"t": 2, "d": 2}
FEW: list[tuple[dict[str, int], Situation]] = [
    (PIPELINE, seeded_by_rank),
    (REPLICAS, one_gradient_changed),
]
MORE: list[tuple[dict[str, int], Situation]] = [
    (PIPELINE, same_seed),
    (REPLICAS, computed_wrongly),
    (REPLICAS, sampler_over_all_ranks),
    ({"p": 2, "d": 2}, sampler_over_all_ranks),
    (REPLICAS, sampler_over_replicas),
    (PIPELINE, one_gradient_changed),
    (PIPELINE, torch_clips),
    (PIPELINE, evaluated_by_rank),
    (PIPELINE, loaded_by_rank),
    (REPLICAS, checked_by_rank),
]


def main() -> None:
    told = {
        f"{situation.__name__} {' '.join(f'{k}={v}' for k, v in mesh.items())}": attempt(mesh, situation)
        for mesh, situation in (MORE if sys.argv[1:] == ["more"] else FEW)
    }
    print(json.dumps(told))


if __name__ == "__main__":
    torch.distributed.init_process_group("gloo")
    main()
