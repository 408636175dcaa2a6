"""Run by `test_lengths.py` as one of 2 or 4 ranks over gloo: batches of several lengths and numbers of rows, beside one device;
and batches that no program can be for.

Every rank prints one JSON line: for each of the situations of so many ranks what was raised, or "" for nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn

import autoptd
from autoptd import PlanError
from autoptd.model.parallel_model import ParallelModel
from tests.parity.models import VOCAB, batch, gpt

Situation = Callable[[ParallelModel, int], None]
LR = 0.1


def cut(rows: int, length: int, step: int = 0) -> tuple[torch.Tensor, ...]:
    """A global batch of so many rows and tokens."""
    return tuple((x[:, :length] + step) % 60 for x in batch(rows))


def trains(pm: ParallelModel, rank: int) -> None:
    assert pm.rank == rank == torch.distributed.get_rank()
    model = gpt(2).double()
    ours, plain = pm.optimizer(torch.optim.SGD, lr=LR), torch.optim.SGD(model.parameters(), lr=LR)
    for step, (rows, length) in enumerate([(8, 8), (8, 6), (16, 4), (8, 6)]):
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
        loss, found = pm.eval_step(*pm.local_batch(x, y), outputs=outputs)
        torch.testing.assert_close(loss, wanted, rtol=1e-9, atol=1e-9)
        with torch.no_grad():
            expected = outputs(model(x, y), x, y)
        # All ranks have the rows of their replica, and sums over the whole batch.
        replica, replicas = pm.share
        _, whole = pm.eval_step(*pm.local_batch(x, y), outputs=outputs, everywhere=True)
        torch.testing.assert_close(whole, expected, rtol=1e-9, atol=1e-9)
        expected["logits"] = expected["logits"].chunk(replicas)[replica]
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    state = pm.state_dict()
    for name, x in model.state_dict().items():
        if rank == 0:
            torch.testing.assert_close(state[name], x, rtol=1e-9, atol=1e-9)
    assert len(pm.programs) == 3


def outputs(output: Any, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
    right = output[0].argmax(-1) == y
    return {"logits": output[0], "right": right.sum(), "twos": torch.full((3,), 2, dtype=torch.int8)}


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    logits, loss = model(x, y)
    assert logits is not None
    return loss  # type: ignore[no-any-return]


def one_length_differs(pm: ParallelModel, rank: int) -> None:
    x, y = pm.local_batch(*cut(8, 8))
    pm.step(x, y)
    length = 6 if rank == torch.distributed.get_world_size() - 1 else 8
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

    with mock.patch("autoptd.compiler.compiler.Compiler.for_sizes", fail) if rank == 1 else mock.MagicMock():
        try:
            pm.step(*pm.local_batch(*cut(8, 6)))
        except autoptd.AutoptdError as error:
            # And all go on together.
            pm.step(*pm.local_batch(*cut(8, 8)))
            pm.step(*pm.local_batch(*cut(8, 6)))
            raise error


def too_many(pm: ParallelModel, rank: int) -> None:
    for length in (8, 7, 8, 6):
        pm.step(*pm.local_batch(*cut(8, length)))


def padded_trains(pm: ParallelModel, rank: int) -> None:
    """Each replica pads to its own longest row; in the last batch a row is missing in all."""
    model = gpt(2).double()
    for step, (first, second, rows) in enumerate([(8, 8, 8), (3, 2, 8), (1, 7, 8), (4, 3, 6)]):
        x, y = cut(rows, 8, step)
        # What a replica does not have counts nowhere.
        lengths = [first] * (rows // 2) + [second] * (rows // 2)
        for row, length in enumerate(lengths):
            y[row, length:] = -100
        wanted = loss_of(model, x, y)
        length = max(first, second) if pm.options.d == 1 else (first, second)[pm.share[0]]
        own = [tensor[:, :length] for tensor in pm.local_batch(x, y)]
        torch.testing.assert_close(pm.step(*own), wanted.detach(), rtol=1e-9, atol=1e-9)
        with torch.no_grad():
            torch.testing.assert_close(pm.eval_step(*own), wanted.detach(), rtol=1e-9, atol=1e-9)
    gradients = pm.gradients()
    model.zero_grad()
    assert pm.steps == 4 and len(pm.programs) == 2 and bool(gradients) == (rank == 0)


def evaluates_the_rest(pm: ParallelModel, rank: int) -> None:
    """The last batches of a dataset, whose rows d does not divide; the model is evaluated on them, and not trained."""
    model = gpt(2).double()
    for rows in (5, 8, 1, 5):
        with torch.no_grad():
            wanted = loss_of(model, *cut(rows, 8))
        share = pm.local_batch(*cut(rows, 8))
        torch.testing.assert_close(pm.eval_step(*share), wanted, rtol=1e-9, atol=1e-9)
        _, found = pm.eval_step(*share, outputs=outputs, everywhere=True)
        with torch.no_grad():
            expected = outputs(model(*cut(rows, 8)), *cut(rows, 8))
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    # The replicas may have other numbers of rows than `local_batch` would give them.
    x, y = cut(7, 8)
    own = slice(0, 1) if pm.share[0] else slice(1, 7)
    with torch.no_grad():
        torch.testing.assert_close(pm.eval_step(x[own], y[own]), loss_of(model, x, y), rtol=1e-9, atol=1e-9)
        expected = outputs(model(x.roll(-1, 0), y.roll(-1, 0)), x.roll(-1, 0), y.roll(-1, 0))
    _, found = pm.eval_step(x[own], y[own], outputs=outputs, everywhere=True)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    pm.step(*share)


def reads_padding(pm: ParallelModel, rank: int) -> None:
    pass


def too_long(pm: ParallelModel, rank: int) -> None:
    x, y = cut(8, 8)
    pm.step(*pm.local_batch(torch.cat([x] * 4, 1), torch.cat([y] * 4, 1)))


class Bidirectional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(VOCAB, 16), nn.Linear(16, VOCAB)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)[:, None]
        x = F.scaled_dot_product_attention(x, x, x)[:, 0]
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Follows(Bidirectional):
    """Follows the mean of what it evaluates."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) - self.mean
        self.mean.lerp_(x.detach().mean((0, 1)), 0.3)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def updates_where_the_first_replica_has_no_rows(pm: ParallelModel, rank: int) -> None:
    model = Follows().double()
    for counts in ((4, 4), (0, 2), (3, 1)):
        x, y = cut(sum(counts), 8)
        with torch.no_grad():
            wanted = model(x, y)
        own = [tensor.split(list(counts))[pm.share[0]] for tensor in (x, y)]
        torch.testing.assert_close(pm.eval_step(*own), wanted, rtol=1e-9, atol=1e-9)


def attempt(mesh: dict[str, Any], situation: Situation) -> str:
    """What was raised."""
    keywords = {"shapes": "exact", "max_programs": 4, "example_inputs": cut(8, 8), "timeout": 60}
    others: dict[Situation, type[nn.Module]] = {
        reads_padding: Bidirectional,
        updates_where_the_first_replica_has_no_rows: Follows,
    }
    try:
        pm = autoptd.parallelize(others.get(situation, lambda: gpt(2))().double(), **{**keywords, **mesh})
        situation(pm, torch.distributed.get_rank())
    except Exception as error:
        if not isinstance(error, PlanError | autoptd.RuntimeFault):
            raise
        return f"{type(error).__name__}: {error}"
    return ""


PIPELINE, REPLICAS = {"t": 2, "p": 2}, {"p": 2, "d": 2}
BUCKETS: dict[str, Any] = {"shapes": "bucket"}
ROWS: dict[str, Any] = {"shapes": None, "max_programs": None}
FEW: list[tuple[dict[str, Any], Situation]] = [
    ({"d": 2}, one_length_differs),
    ({"d": 2} | BUCKETS, padded_trains),
    ({"d": 2} | ROWS, evaluates_the_rest),
    ({"d": 2, "num_microbatches": 2} | ROWS, updates_where_the_first_replica_has_no_rows),
]
MORE: list[tuple[dict[str, Any], Situation]] = [
    (PIPELINE, trains),
    (REPLICAS, one_length_differs),
    (REPLICAS | BUCKETS, padded_trains),
    (REPLICAS | ROWS, evaluates_the_rest),
    (PIPELINE, one_cannot_compile),
    (PIPELINE | BUCKETS, too_long),
    ({"t": 2, "d": 2, "zero": 1, "sequence_parallel": True}, trains),
    (REPLICAS, rows_differ),
    (PIPELINE, calls_differ),
    (PIPELINE, one_passes_no_tensor),
    (REPLICAS | {"max_programs": 2}, too_many),
    (PIPELINE, too_long),
    (PIPELINE | BUCKETS, padded_trains),
    (REPLICAS | BUCKETS, rows_differ),
    (REPLICAS | BUCKETS, reads_padding),
]


def main() -> None:
    told = {
        f"{situation.__name__} {' '.join(f'{k}={v}' for k, v in mesh.items())}": attempt(mesh, situation)
        for mesh, situation in (MORE if torch.distributed.get_world_size() == 4 else FEW)
    }
    print(json.dumps(told))


if __name__ == "__main__":
    torch.distributed.init_process_group("gloo")
    main()
