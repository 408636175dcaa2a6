"""Batches of several lengths and numbers of rows in one run: loss, gradients, updated parameters and evaluations of one device.

That every layout goes with `shapes="exact"` is in the covering array; here are buckets, long runs of random lengths, packed
sequences, and what lies between steps of different programs.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoptd
from autoptd import Buckets, ParallelModel
from autoptd.runtime.params import storage
from autoptd.runtime.world.world import Pending
from tests.parity.covering import aliases, compare
from tests.parity.models import LENGTH, batch, gpt

LR = 1e-2
Sizes = Sequence[tuple[int, int]]


def cut(rows: int, length: int, step: int = 0) -> tuple[Tensor, Tensor]:
    """(ids, targets) of a step; some labels do not count."""
    ids, targets = ((x[:, :length] + step) % 60 for x in batch(rows))
    return ids, targets.masked_fill(targets % 7 == step % 7, -100)


def loss_of(model: nn.Module, *call: Tensor) -> Tensor:
    out = model(*call)
    loss: Tensor = out[1] if isinstance(out, tuple) else out
    return loss


@contextmanager
def running(model: nn.Module, example: Any, **keywords: Any) -> Iterator[ParallelModel]:
    about = {"backend": "local", "timeout": 60, "example_inputs": example}
    pm = autoptd.parallelize(model, **about, **keywords)
    try:
        yield pm
    finally:
        pm.close()


def trains_alike(pm: ParallelModel, model: nn.Module, calls: Sequence[Sequence[Tensor]]) -> None:
    """Train beside one device; long runs by SGD, for AdamW lets rounding grow tenfold in every few steps."""
    adam: tuple[Any, dict[str, Any]] = (torch.optim.AdamW, {"lr": LR, "eps": 1e-3})
    cls, about = adam if len(calls) < 20 else (torch.optim.SGD, {"lr": LR})
    ours, plain = pm.optimizer(cls, **about), cls(model.parameters(), **about)
    for step, call in enumerate(calls):
        loss = loss_of(model, *call)
        loss.backward()
        compare("loss", step, {"": pm.step(*call)}, {"": loss})
        gradients = {name: p.grad for name, p in aliases(model).items() if p.grad is not None}
        compare("gradient", step, pm.gradients(), gradients)
        for optimizer in (ours, plain):
            optimizer.step()
            optimizer.zero_grad()
        compare("parameter", step, pm.state_dict(), aliases(model), floor=LR)
        if step % 3 == 0:
            with torch.no_grad():
                compare("evaluation", step, {"": pm.eval_step(*call)}, {"": loss_of(model, *call)})


SOME: Sizes = [(8, 8), (8, 5), (8, 3), (8, 8), (7, 7), (8, 1), (3, 2), (8, 4)]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "shapes",
    ["bucket", pytest.param(Buckets((8, 5, 2)), marks=pytest.mark.thorough)],
    ids=["halves", "given"],
)
@pytest.mark.parametrize(
    "mesh",
    [
        {"t": 2},
        {"p": 2, "d": 2, "zero": 1},
        {"t": 2, "p": 2, "v": 2, "num_microbatches": 2},
        {"c": 2, "num_microbatches": 2},
        {"t": 2, "sequence_parallel": True},
    ],
    ids=str,
)
def test_padded_batches_train_like_batches_that_are_not(mesh: dict[str, Any], shapes: Any) -> None:
    splits_tokens = "c" in mesh or "sequence_parallel" in mesh
    if splits_tokens and shapes != "bucket":
        shapes = Buckets((8, 6, 2))  # all of which divide
    with running(gpt(4).double(), cut(8, 8), shapes=shapes, **mesh) as pm:
        trains_alike(pm, gpt(4).double(), [cut(*size, step) for step, size in enumerate(SOME)])
        lengths = [program.inputs[0].shape[1] for program in pm.programs]
        assert lengths == ([8, 4, 2] if splits_tokens else [8, 4, 1, 2]) if shapes == "bucket" else True
        assert len(lengths) == len(set(lengths)), "a bucket is compiled once"


@pytest.mark.parametrize(
    "count", [3, pytest.param(100, marks=pytest.mark.thorough)]
)  # in one run, without a program beyond those of the buckets
def test_random_lengths_in_buckets(count: int) -> None:
    sizes = random.Random(1)
    calls = [cut(sizes.choice((8, 8, 8, 5)), sizes.randint(1, LENGTH), step) for step in range(count)]
    with running(gpt(2).double(), cut(8, 8), t=2, shapes="bucket") as pm:
        trains_alike(pm, gpt(2).double(), calls)
        assert len(pm.programs) <= 4


@pytest.mark.thorough
def test_random_lengths_of_their_own() -> None:
    sizes = random.Random(2)
    calls = [cut(sizes.choice((4, 8)), sizes.randint(1, LENGTH), step) for step in range(100)]
    with running(gpt(2).double(), cut(8, 8), p=2, d=2, shapes="exact") as pm:
        trains_alike(pm, gpt(2).double(), calls)
        assert len(pm.programs) == len({tuple(ids.shape) for ids, _ in calls} | {(8, 8)}) == 16


class Packed(nn.Module):
    """Documents one behind the other: token 0 begins one. Positions and who sees whom are made of the ids, or given."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.positions = nn.Embedding(60, 16), nn.Embedding(LENGTH, 16)
        self.qkv = nn.ModuleList(nn.Linear(16, 48) for _ in range(4))
        self.head = nn.Linear(16, 60)

    def forward(self, ids: Tensor, labels: Tensor, positions: Tensor | None = None) -> Tensor:
        is_first = ids == 0 if positions is None else positions == 0
        documents = is_first.cumsum(1)
        if positions is None:
            places = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
            positions = places - torch.where(is_first, places, 0).cummax(1).values
        x = self.embed(ids) + self.positions(positions)
        sees = (documents[:, :, None] == documents[:, None, :]).tril()[:, None]
        for qkv in self.qkv:
            q, k, v = (y.unflatten(-1, (4, 4)).transpose(1, 2) for y in qkv(x).chunk(3, -1))
            x = x + F.scaled_dot_product_attention(q, k, v, attn_mask=sees).transpose(1, 2).flatten(2)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def packed(length: int, step: int, has_positions: bool) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(step)
    ids, labels = (torch.randint(1, 60, (8, length), generator=generator) for _ in range(2))
    ids[torch.rand(8, length, generator=generator) < 0.3] = 0
    ids[:, 0] = 0
    if not has_positions:
        return ids, labels
    places = torch.arange(length).expand_as(ids)
    return ids, labels, places - torch.where(ids == 0, places, 0).cummax(1).values


@pytest.mark.one_in(96)
@pytest.mark.parametrize("shapes", ["exact", "bucket"])
@pytest.mark.parametrize("has_positions", [True, False], ids=["positions", "ids alone"])
@pytest.mark.parametrize("mesh", [{"p": 2}, {"t": 2, "p": 2, "v": 2, "num_microbatches": 2}], ids=str)
def test_packed_sequences_under_pipelines(mesh: dict[str, Any], has_positions: bool, shapes: str) -> None:
    calls = [packed(length, step, has_positions) for step, length in enumerate((8, 5, 8, 3))]
    with running(Packed().double(), calls[0], shapes=shapes, **mesh) as pm:
        trains_alike(pm, Packed().double(), calls)


def test_gradients_of_several_programs_add_up() -> None:
    """Steps without an update between them, of programs whose hooks are on the same leaves."""
    model = gpt(2).double()
    with running(gpt(2).double(), cut(8, 8), p=2, d=2, shapes="exact") as pm:
        for number, size in enumerate([(8, 8), (8, 4), (8, 8), (16, 8), (8, 4)]):
            loss = loss_of(model, *cut(*size, number))
            loss.backward()
            compare("loss", number, {"": pm.step(*cut(*size, number))}, {"": loss})
        compare("gradient", 4, pm.gradients(), {name: p.grad for name, p in aliases(model).items()})  # type: ignore[misc]
        assert pm.steps == 5


class Windowed(nn.Module):
    """Attention by a mask in a buffer: a window of tokens, which shorter batches do not fill, so that theirs is causal."""

    def __init__(self, window: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(60, 16), nn.Linear(16, 60)
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        self.register_buffer("mask", mask & ~mask.tril(-window))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        q = self.embed(ids).unflatten(-1, (4, 4)).transpose(1, 2)
        mask = self.mask[: ids.shape[1], : ids.shape[1]]
        x = F.scaled_dot_product_attention(q, q, q, attn_mask=mask).transpose(1, 2).flatten(2)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("mesh", [{"t": 2}, {"p": 2}], ids=str)
def test_loaded_buffers_hold_for_all_lengths(mesh: dict[str, int]) -> None:
    """What was proven of them for a short length, and not for the first, is proven anew."""
    model, other = Windowed(6).double(), Windowed(2).double()
    with running(Windowed(6).double(), cut(8, 8), shapes="exact", **mesh) as pm:
        for size in ((8, 8), (8, 4)):
            compare("loss", 0, {"": pm.step(*cut(*size))}, {"": loss_of(model, *cut(*size))})
            compare("evaluation", 0, {"": pm.eval_step(*cut(*size))}, {"": loss_of(model, *cut(*size))})
        pm.load_state_dict(other.state_dict())
        assert len(pm.programs) == 1
        for size in ((8, 8), (8, 4), (8, 2)):
            compare("loss", 0, {"": pm.step(*cut(*size))}, {"": loss_of(other, *cut(*size))})
            compare("evaluation", 0, {"": pm.eval_step(*cut(*size))}, {"": loss_of(other, *cut(*size))})


def test_a_program_that_comes_while_updates_are_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    """With zero=1 stages wait for a gather where they read: those that are made meanwhile read what has arrived."""
    start = storage.start_gather

    class Late(Pending):
        """A gather that happens when it is waited for."""

        def __init__(self, group: Any, flat: Tensor, site: str) -> None:
            self.given = (group, flat, site)

        def wait(self) -> Any:
            return start(*self.given).wait()

        def is_done(self) -> bool:
            return False

    monkeypatch.setattr(storage, "start_gather", Late)
    calls = [cut(*size, step) for step, size in enumerate([(8, 8), (8, 4), (8, 8), (8, 6), (8, 4)])]
    with running(gpt(2).double(), calls[0], d=2, zero=1, shapes="exact") as pm:
        optimizer = pm.optimizer(torch.optim.AdamW, lr=LR, eps=1e-3)
        model = gpt(2).double()
        plain = torch.optim.AdamW(model.parameters(), lr=LR, eps=1e-3)
        for step, call in enumerate(calls):
            loss = loss_of(model, *call)
            loss.backward()
            compare("loss", step, {"": pm.step(*call)}, {"": loss})
            for one in (plain, optimizer):
                one.step()
                one.zero_grad()
