"""The predicted peak of every rank, beside all storages that are alive while it runs a step, on tensors with numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import autoptd
from autoptd.compiler.peak_memory import LiveBytes
from autoptd.ir.actions import Action
from autoptd.program.program import Program
from autoptd.runtime.params.guard import unguarded
from autoptd.runtime.params.parameters import RankParameters
from autoptd.runtime.step.executor import Executor
from autoptd.runtime.step.launch import Rank
from autoptd.runtime.step.microbatches import cut
from autoptd.runtime.world.processes import DistributedChannel
from autoptd.runtime.world.world import Done, Pending
from benchmarks.lib.one_rank import one_rank
from examples.gpt import GPT, GPTConfig

ROWS, LENGTH, VOCAB = 8, 64, 256
CELLS: list[dict[str, Any]] = [
    {},
    {"recompute": "full"},
    {"d": 2, "zero": 1, "recompute": "auto", "memory_price": 1e-9},
    {"t": 2, "sequence_parallel": True, "recompute": "selective"},
    {"p": 2, "schedule": "gpipe", "recompute": "full:1/2"},
    {"p": 2, "schedule": "zb_h1"},
    {"p": 2, "schedule": "zb_h1", "recompute": "full"},
    {"p": 2, "v": 2, "schedule": "interleaved", "recompute": "full"},
    {"p": 2, "v": 2, "schedule": "zbv", "d": 2, "zero": 1},
    {"p": 2, "d": 2, "zero": 1, "precision": "bf16"},
    {"p": 2, "d": 2, "zero": 1, "precision": "bf16", "recompute": "full", "schedule": "zb_h1"},
    {"p": 2, "t": 2, "d": 2, "zero": 1, "sequence_parallel": True, "recompute": "full", "schedule": "gpipe"},
    {"p": 4, "recompute": "full", "fuse": False},
    {"t": 2, "d": 2, "precision": "bf16", "recompute": "full"},
]


def model() -> GPT:
    with torch.device("meta"):
        return GPT(
            GPTConfig(n_embd=128, n_head=4, n_layer=4, block_size=LENGTH, vocab_size=VOCAB, dropout=0.1)
        )


def batch(replicas: int = 1, device: str = "cpu") -> tuple[Tensor, Tensor]:
    ids = torch.zeros((ROWS * replicas, LENGTH), dtype=torch.long, device=device)
    return ids, ids.clone()


@pytest.mark.thorough
@pytest.mark.one_in(9)
@pytest.mark.parametrize("asked", CELLS, ids=str)
def test_the_fullest_moment(asked: dict[str, Any]) -> None:
    asked = {"num_microbatches": 4, **asked}
    program = autoptd.compile(model(), example_inputs=batch(asked.get("d", 1), "meta"), **asked)
    peaks = autoptd.peak_memory(program)
    for place, peak in enumerate(peaks):
        measured = measured_peak(program, place, asked)
        assert measured * 0.99 <= peak.nbytes <= measured * 1.01, (place, peak, measured)


def measured_peak(program: Program, place: int, asked: dict[str, Any]) -> int:
    """Most bytes that were alive at once on the first rank of a place, in a step between two others, with AdamW's moments."""
    number, call = program.mesh.ranks_at(place)[0], batch()
    with mock.patch.object(DistributedChannel, "send", _sent):
        rank = one_rank(model(), call, rank=number, device="cpu", **asked)
        try:
            step(rank, call)
            live = LiveBytes()
            for x in held_by(rank.params, rank.executor):
                live.add(x)
            live.most = live.now
            with live:
                step(rank, call)
        finally:
            rank.world.close()
            dist.destroy_process_group()
    return live.most + program.memory(number).moments


def _sent(channel: DistributedChannel, tensors: Sequence[Tensor], site: str) -> Pending:
    """A message that is taken at once: nobody is there, and how long a send takes would be a matter of threads."""
    return Done()


def held_by(params: RankParameters, executor: Executor) -> Iterator[Tensor]:
    yield from (*params.local.values(), *params.stored.values(), *params.leaves.values())
    for bucket in params.shared:
        yield from (bucket.use, bucket.range)
    yield from executor.buffers.values()


def step(rank: Rank, call: tuple[Tensor, Tensor]) -> None:
    """A step; gradients are gone afterwards, as behind an optimizer's."""
    microbatches = cut(rank.executor.program, call, rank.executor.inputs, 0, rank.world.device)
    rank.executor.step(microbatches, nan="ignore")
    with unguarded():
        for x in (*rank.params.local.values(), *rank.params.stored.values()):
            x.grad = None


@pytest.mark.thorough
def test_what_is_kept_too_long_shows() -> None:
    asked: dict[str, Any] = {"p": 2, "num_microbatches": 4}
    program = autoptd.compile(model(), example_inputs=batch(1, "meta"), **asked)
    peaks = autoptd.peak_memory(program)
    original, kept = Executor._backward, []

    def backward(self: Executor, action: Action) -> None:
        kept.append(self._saved[action.stage, action.microbatch])
        original(self, action)

    with mock.patch.object(Executor, "_backward", backward):
        assert measured_peak(program, 1, asked) > 1.01 * peaks[1].nbytes


def test_tensors_that_a_model_makes_itself() -> None:
    """On a device of their own, and read by Python."""

    def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
        weight = torch.linspace(0.2, 1.2, VOCAB)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), weight=weight, ignore_index=-100)

    net = nn.Sequential(nn.Embedding(VOCAB, 16), nn.Linear(16, VOCAB))
    call = dict(zip(("input", "targets"), batch(), strict=True))
    program = autoptd.compile(net, num_microbatches=2, loss_fn=loss_fn, example_inputs=call)
    (peak,) = autoptd.peak_memory(program)
    assert peak.nbytes > program.costs.cut.rank_bytes[0]


def test_values_of_another_size_than_keys() -> None:
    """For which the kernel that is split into blocks does not do, where ranks divide tokens."""

    class Latent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.qk, self.v = nn.Embedding(VOCAB, 16), nn.Linear(16, 48), nn.Linear(16, 12)
            self.head = nn.Linear(12, VOCAB)

        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            x = self.embed(ids)
            parts = (*self.qk(x).chunk(2, -1), self.v(x))
            q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in parts)
            z = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
            return F.cross_entropy(self.head(z).flatten(0, 1), labels.flatten())

    asked: dict[str, Any] = {"c": 2, "context": "all_gather", "example_inputs": batch()}
    program = autoptd.compile(Latent(), num_microbatches=2, **asked)
    assert all(peak.nbytes > 0 for peak in autoptd.peak_memory(program))
    autoptd.verify(Latent().double(), **asked)


def test_memory_is_a_promise() -> None:
    """What a bound leaves holds for the fullest moment, not for what is kept alone; a program says where that is."""
    asked: dict[str, Any] = {"p": 2, "num_microbatches": 4, "example_inputs": batch(1, "meta")}
    free = autoptd.compile(model(), **asked)
    assert free.costs.cut.peak_bytes == ()
    held, most = max(free.costs.cut.rank_bytes), max(autoptd.peak_memory(free))
    assert held < most.nbytes
    bound = (held + most.nbytes) / 2
    program = autoptd.compile(model(), memory=bound, **asked)
    assert max(program.costs.cut.peak_bytes) == program.plan["relief"]["peak_bytes"] <= bound
    assert [peak.nbytes for peak in autoptd.peak_memory(program)] == list(program.costs.cut.peak_bytes)
    assert any(program.costs.cut.again_seconds)


def test_a_running_model_is_no_program() -> None:
    small = GPT(GPTConfig(n_embd=16, n_head=2, n_layer=1, block_size=LENGTH, vocab_size=VOCAB))
    pm = autoptd.parallelize(small, example_inputs=batch(4), backend="local")
    try:
        for call in (autoptd.peak_memory, lambda it: autoptd.predict_program(it, "dgx-h100")):
            told = r"takes a Program, and got a ParallelModel\. Remedy: its program: pm\.program"
            with pytest.raises(autoptd.PlanError, match=told):
                call(pm)
            with pytest.raises(autoptd.PlanError, match=r"got a GPT\. Remedy: what autoptd\.compile"):
                call(model())  # type: ignore[arg-type]
            assert call(pm.program)
    finally:
        pm.close()
