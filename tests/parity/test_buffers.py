"""Buffers that a forward updates: once a step, with the value of one device that sees the whole batch in one call."""

from __future__ import annotations

import copy
import re
from collections import Counter as Counted
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoptd
from autoptd.errors import AutoptdError, PlanError, RuntimeFault
from autoptd.model.parallel_model import ParallelModel
from autoptd.program.calls import expected_calls
from autoptd.program.program import Program
from tests.parity.buffers import (
    BY_SUMS,
    NORMS,
    Counter,
    CumulativeNorm,
    Norm,
    Router,
    Statistics,
    Updating,
    WeightNorm,
    batches,
    make,
)

PAGE = Path(__file__).parents[2] / "docs/howto/buffers.md"
MESHES: tuple[dict[str, Any], ...] = (
    {},
    {"num_microbatches": 4},
    {"t": 2, "d": 2, "num_microbatches": 2},
    {"p": 2, "d": 2, "num_microbatches": 2, "zero": 1},
)
ONE_BATCH: tuple[dict[str, Any], ...] = ({"num_microbatches": 1}, {"d": 2}, {"p": 2, "t": 2, "d": 2})


class Both:
    """A parallel model beside the plain one on one device: every call of both is compared."""

    def __init__(self, model: nn.Module, call: tuple[Tensor, ...], **options: Any) -> None:
        self.plain = copy.deepcopy(model)
        self.pm: ParallelModel = autoptd.parallelize(model, backend="local", example_inputs=call, **options)
        self.ours = self.pm.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
        self.theirs = torch.optim.SGD(self.plain.parameters(), lr=0.1, momentum=0.9)

    def step(self, call: tuple[Tensor, ...]) -> None:
        wanted = self.plain(*call)
        wanted.backward()
        close(self.pm.step(*call), wanted)
        gradients = self.pm.gradients()
        for name, parameter in self.plain.named_parameters():
            if parameter.grad is not None:
                close(gradients[name], parameter.grad)
        for optimizer in (self.ours, self.theirs):
            optimizer.step()
            optimizer.zero_grad()
        self.compare()

    @torch.no_grad()
    def evaluate(self, call: tuple[Tensor, ...]) -> None:
        self.plain.eval()
        close(self.pm.eval_step(*call), self.plain(*call))
        self.plain.train()
        self.compare()

    def compare(self) -> None:
        state = self.pm.state_dict()
        for name, x in self.plain.state_dict().items():
            assert state[name].dtype == x.dtype and state[name].shape == x.shape
            # A count is exact.
            assert x.is_floating_point() or torch.equal(state[name], x)
            close(state[name], x)


def close(ours: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(ours.detach(), wanted.detach(), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("options", MESHES, ids=str)
@pytest.mark.parametrize("kind", BY_SUMS)
def test_updates_are_those_of_one_device(kind: type[Updating], options: dict[str, Any]) -> None:
    first, second, third = batches(3)
    both = Both(make(kind), first, **options)
    both.step(first)
    both.evaluate(second)
    both.step(second)
    both.evaluate(third)
    both.pm.close()


def test_statistics_are_averages_over_all_steps(tmp_path: Path) -> None:
    """Of batch norms with momentum=None, one of which counts twice a step; also where a run goes on."""
    first, second, third = batches(3)
    both = Both(make(CumulativeNorm), first, d=2)
    both.step(first)
    both.evaluate(third)
    both.step(second)
    both.pm.save(tmp_path / "saved", both.ours)
    other = Both(make(CumulativeNorm), first, num_microbatches=1)
    other.pm.load(tmp_path / "saved", other.ours)
    other.plain, other.theirs = both.plain, both.theirs
    other.step(third)
    assert int(other.pm.state_dict()["norm.num_batches_tracked"]) == 6
    both.pm.close()
    other.pm.close()


@pytest.mark.parametrize("options", ONE_BATCH, ids=str)
@pytest.mark.parametrize("kind", NORMS)
def test_batch_norm_is_that_of_the_whole_batch(kind: type[Updating], options: dict[str, Any]) -> None:
    if kind is not Norm and "p" in options:
        options = {"t": 2, "d": 2}
    first, second, third = batches(3)
    both = Both(make(kind), first, **options)
    both.step(first)
    both.evaluate(third)
    both.step(second)
    both.pm.close()


class Experts(nn.Module):
    """Two layers of experts over tokens, balanced by what each got."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)
        self.layers = nn.ModuleList(Balanced() for _ in range(2))

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


class Balanced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate, self.up = nn.LayerNorm(8), nn.Linear(8, 4), nn.Linear(8, 4 * 8)
        self.register_buffer("bias", torch.zeros(4))
        self.register_buffer("tokens", torch.zeros(4, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        scores = self.gate(h).sigmoid()
        chosen = F.one_hot((scores + self.bias).topk(2, -1).indices, 4).sum(-2)
        if self.training:
            with torch.no_grad():
                counts = chosen.sum((0, 1))
                self.tokens += counts
                self.bias += 0.05 * torch.sign(counts.to(self.bias).mean() - counts)
        experts = self.up(h).unflatten(-1, (4, 8)).relu()
        return x + (experts * (scores * chosen).unsqueeze(-1)).sum(-2)


@pytest.mark.parametrize(
    "options",
    [
        {"c": 2, "t": 2, "num_microbatches": 2},
        {"p": 2, "d": 2, "recompute": "full", "num_microbatches": 2},
        {"t": 2, "sequence_parallel": True, "d": 2},
    ],
    ids=str,
)
def test_experts_are_balanced_by_the_tokens_of_all_ranks(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    ids = torch.randint(0, 16, (8, 4))
    both = Both(Experts().double(), (ids, ids.roll(1, 1)), **options)
    for step in range(2):
        both.step((ids.roll(step, 0), ids.roll(1, 1).roll(step, 0)))
    with both.pm.record() as record:
        both.pm.step(ids, ids)
    for rank in range(both.pm.program.mesh.size):
        assert Counted(record.of(rank)) == expected_calls(both.pm.program, rank)
    both.pm.close()


def test_updates_go_on_where_a_checkpoint_was_saved(tmp_path: Path) -> None:
    """On another mesh, with more microbatches, whose buffers were elsewhere by then; after an evaluation made a program."""
    first, second, third = batches(3)
    both = Both(make(Router), first, num_microbatches=1)
    both.step(first)
    both.pm.save(tmp_path / "saved", both.ours)
    other = Both(make(Router), first, t=2, d=2, num_microbatches=2)
    other.step(second)
    other.evaluate(third)
    other.pm.load(tmp_path / "saved", other.ours)
    other.plain, other.theirs = both.plain, both.theirs
    other.evaluate(third)
    other.step(second)
    other.pm.load_state_dict(make(Router).state_dict())
    other.plain.load_state_dict(make(Router).state_dict())
    other.evaluate(third)
    both.pm.close()
    other.pm.close()


def test_all_sizes_of_batches_update_the_same_buffers(tmp_path: Path) -> None:
    """Also where programs come from a cache, which tells updates apart that only differ in what follows the last sum."""

    class Slower(Statistics):
        def update(self, h: Tensor) -> Tensor:
            with torch.no_grad():
                self.kept.lerp_(h.mean(0), self.rate)
            return h

    for rate in (0.5, 0.25):
        Slower.rate = rate
        (large,), (small,) = batches(1), batches(1, rows=4)
        both = Both(make(Slower), large, d=2, shapes="exact", program_cache=str(tmp_path))
        for call in (large, small, large):
            both.step(call)
        both.evaluate(small)
        both.step(small)
        both.pm.close()


def test_the_dtype_of_a_number_of_tokens_holds_large_counts() -> None:
    model = make(Router)
    model.steps += 2**40
    both = Both(model, *batches(1), num_microbatches=2)
    both.step(*batches(1))
    assert 2**40 < int(both.pm.state_dict()["steps"]) == int(both.plain.steps)
    both.pm.close()


class Rate(Updating):
    def update(self, h: Tensor) -> Tensor:
        self.kept += h.detach().sum(0) / h.shape[0]
        self.ema += h.shape[0]
        return h


def test_the_update_reads_as_the_page_says() -> None:
    program = autoptd.compile(make(Router), d=2, num_microbatches=2, example_inputs=batches(1)[0])
    (shown,) = re.findall(r"```text\n(class Updates.*?)```", PAGE.read_text(), re.S)
    assert shown in program.sources["updates.py"]


def test_the_users_model_keeps_its_buffers() -> None:
    model = make(Counter)
    (call,) = batches(1)
    pm = autoptd.parallelize(model, d=2, backend="local", example_inputs=call)
    pm.step(*call)
    assert int(model.steps) == 0 and int(pm.state_dict()["steps"]) == 1
    pm.close()


def test_a_step_whose_loss_is_nan_has_counted() -> None:
    """As on one device, whose forward ran; its gradients are dropped."""
    (call,) = batches(1)
    pm = autoptd.parallelize(make(Counter), d=2, backend="local", example_inputs=call)
    with pytest.raises(RuntimeFault, match="NaN"):
        pm.step(call[0] * float("nan"), call[1])
    assert int(pm.state_dict()["steps"]) == 1
    pm.close()


def test_a_saved_program_updates(tmp_path: Path) -> None:
    (call,) = batches(1)
    program = autoptd.compile(make(Router), t=2, d=2, num_microbatches=2, example_inputs=call)
    program.save(tmp_path)
    loaded = Program.load(tmp_path)
    assert loaded.updated == ("bias", "steps") == loaded.updated_by_batch
    assert loaded.fingerprint() == program.fingerprint() and "updates.py" in loaded.sources


class Maximum(Updating):
    def update(self, h: Tensor) -> Tensor:
        self.kept = torch.maximum(self.kept, h.detach().amax(0))
        return h


class ReadsAfter(Updating):
    def update(self, h: Tensor) -> Tensor:
        self.kept.lerp_(h.detach().mean(0), 0.1)
        return h - self.kept


class Draws(Updating):
    def update(self, h: Tensor) -> Tensor:
        self.kept.copy_(torch.rand(8))
        return h


class Grows(Updating):
    def update(self, h: Tensor) -> Tensor:
        self.ema = 2 * self.kept
        return h


REFUSED: dict[type[Updating], str] = {
    Maximum: r"amax mixes the samples.*update of buffer kept.*num_microbatches=1",
    ReadsAfter: r"of a sum over samples.*num_microbatches=1",
    Draws: r"update of buffer kept draws random numbers",
    Grows: r"ema .*is changed by the forward",
    Norm: r"norm: .*batch norm in training.*GroupNorm.*num_microbatches=1",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_the_order_of_microbatches_decides_is_refused(kind: type[Updating]) -> None:
    with pytest.raises(AutoptdError, match=REFUSED[kind]):
        autoptd.compile(make(kind), d=2, num_microbatches=2, example_inputs=batches(1)[0])


@pytest.mark.one_in(1)
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (WeightNorm, {"d": 2}),
        (Rate, {"num_microbatches": 2}),
        (Maximum, {"d": 2, "num_microbatches": 1}),
        (ReadsAfter, {"d": 2, "num_microbatches": 1}),
    ],
    ids=[
        "one norm of a weight",
        "rows of the batch",
        "a maximum of one microbatch",
        "read in one microbatch",
    ],
)
def test_two_steps_are_those_of_one_device(kind: type[Updating], options: dict[str, Any]) -> None:
    first, second = batches(2)
    both = Both(make(kind), first, **options)
    both.step(first)
    both.step(second)
    both.pm.close()


def test_padding_would_count() -> None:
    ids = torch.zeros(4, 4, dtype=torch.long)
    with pytest.raises(PlanError, match=r"layers\.0\.tokens.*padding would count.*exact"):
        autoptd.parallelize(Experts(), d=2, shapes="bucket", backend="local", example_inputs=(ids, ids))
