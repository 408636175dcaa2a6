"""Run by `test_lengths.py` as one of 4 ranks over gloo: batches of several lengths and numbers of rows, beside one device; and
batches that no program can be for.

Every rank prints one JSON line: for each situation what was raised, or "" for nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import nn

import autoptd
from autoptd import PlanError
from autoptd.parallel_model import ParallelModel
from tests.parity.models import batch, gpt

Situation = Callable[[ParallelModel, int], None]
LR = 0.1


def cut(rows: int, length: int, step: int = 0) -> tuple[torch.Tensor, ...]:
    """A global batch of so many rows and tokens."""
    return tuple((x[:, :length] + step) % 60 for x in batch(rows))


def trains(pm: ParallelModel, rank: int) -> None:
    model = gpt(2).double()
    ours, plain = pm.optimizer(torch.optim.SGD, lr=LR), torch.optim.SGD(model.parameters(), lr=LR)
    for step, (rows, length) in enumerate([(8, 8), (8, 6), (16, 4), (8, 8), (4, 6), (8, 6)]):
        x, y = cut(rows, length, step)
        wanted = loss_of(model, x, y)
        wanted.backward()
        torch.testing.assert_close(pm.step(*pm.local_batch(x, y)), wanted.detach(), rtol=1e-9, atol=1e-9)
        for optimizer in (ours, plain):
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            wanted = loss_of(model, x, y)
        torch.testing.assert_close(pm.eval_step(*pm.local_batch(x, y)), wanted, rtol=1e-9, atol=1e-9)
    state = pm.state_dict()
    for name, x in model.state_dict().items():
        if rank == 0:
            torch.testing.assert_close(state[name], x, rtol=1e-9, atol=1e-9)
    assert len(pm.programs) == 4


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    logits, loss = model(x, y)
    assert logits is not None
    return loss  # type: ignore[no-any-return]


def one_length_differs(pm: ParallelModel, rank: int) -> None:
    x, y = pm.local_batch(*cut(8, 8))
    pm.step(x, y)
    length = 6 if rank == 3 else 8
    pm.step(x[:, :length], y[:, :length])


def rows_differ(pm: ParallelModel, rank: int) -> None:
    rows = 2 if pm.share[0] else 4
    pm.step(*cut(rows, 8))


def calls_differ(pm: ParallelModel, rank: int) -> None:
    call = pm.eval_step if rank == 2 else pm.step
    call(*pm.local_batch(*cut(8, 6)))


def one_passes_no_tensor(pm: ParallelModel, rank: int) -> None:
    x, y = pm.local_batch(*cut(8, 6))
    pm.step(x if rank else 3, y)


def one_cannot_compile(pm: ParallelModel, rank: int) -> None:
    def fail(*given: Any, **keywords: Any) -> None:
        raise MemoryError("none left")

    with mock.patch("autoptd.api.compile_sizes", fail) if rank == 1 else mock.MagicMock():
        try:
            pm.step(*pm.local_batch(*cut(8, 6)))
        except autoptd.AutoptdError as error:
            # And all go on together.
            pm.step(*pm.local_batch(*cut(8, 8)))
            pm.step(*pm.local_batch(*cut(8, 6)))
            raise error


def too_many(pm: ParallelModel, rank: int) -> None:
    for length in (8, 7, 6, 5, 4):
        pm.step(*pm.local_batch(*cut(8, length)))


def too_long(pm: ParallelModel, rank: int) -> None:
    x, y = cut(8, 8)
    pm.step(*pm.local_batch(torch.cat([x] * 4, 1), torch.cat([y] * 4, 1)))


def attempt(mesh: dict[str, Any], situation: Situation) -> str:
    """What was raised."""
    keywords = {"shapes": "exact", "max_programs": 4, "example_inputs": cut(8, 8), "timeout": 60}
    pm = autoptd.parallelize(gpt(2).double(), **mesh, **keywords)
    try:
        situation(pm, torch.distributed.get_rank())
    except Exception as error:
        assert isinstance(error, PlanError | autoptd.RuntimeFault), repr(error)
        return f"{type(error).__name__}: {error}"
    finally:
        pm.close()
    return ""


def main() -> None:
    pipeline, replicas = {"t": 2, "p": 2}, {"p": 2, "d": 2}
    told = {
        f"{situation.__name__} {' '.join(f'{k}={v}' for k, v in mesh.items())}": attempt(mesh, situation)
        for mesh, situation in (
            (pipeline, trains),
            (replicas, trains),
            ({"t": 2, "d": 2, "zero": 1, "sequence_parallel": True}, trains),
            (pipeline, one_length_differs),
            (replicas, one_length_differs),
            (replicas, rows_differ),
            (pipeline, calls_differ),
            (pipeline, one_passes_no_tensor),
            (pipeline, one_cannot_compile),
            (replicas, too_many),
            (pipeline, too_long),
        )
    }
    print(json.dumps(told))


if __name__ == "__main__":
    torch.distributed.init_process_group("gloo")
    main()
