"""`precision="fp16"`: the loop that one writes by hand with a loss scale, and steps that all ranks skip together.

That its path of storage, use and gradients is right in all combinations: `covering.py`, in float64.
"""

from __future__ import annotations

import random
from math import inf
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoptd
from autoptd.errors import PlanError
from autoptd.ir.actions import Action, Kind
from autoptd.kernels.loss import linear_cross_entropy
from autoptd.runtime.params.loss_scale import LossScaler
from tests.parity.checks import verify_module
from tests.parity.models import batch, gpt
from tests.parity.test_precision import SCALE

LR = 1e-2


def start(
    model: nn.Module, data: tuple[Tensor, ...], **keywords: Any
) -> tuple[autoptd.ParallelModel, torch.optim.Optimizer]:
    keywords = {"precision": "fp16", "backend": "local", "timeout": 30, **keywords}
    pm = autoptd.parallelize(model, example_inputs=data, **keywords)
    return pm, pm.optimizer(torch.optim.AdamW, lr=LR)


def test_a_norm_that_overflows_is_no_reason_to_skip() -> None:
    """Of finite gradients, by a p whose powers leave float64."""
    data = batch(2)
    pm, optimizer = start(gpt(1), data, t=2, initial_loss_scale=SCALE)
    pm.step(*data)
    assert pm.clip_grad_norm_(1.0, 0.01).isinf()
    optimizer.step()
    assert not optimizer.step_was_skipped
    pm.close()


def test_an_infinity_that_clipping_by_value_would_hide_is_seen() -> None:
    data = batch(2)
    pm, optimizer = start(gpt(1), data, t=2, initial_loss_scale=SCALE)
    pm.step(*data)
    for parameter in pm.rank_parameters(1).values():
        parameter.grad = torch.full_like(parameter, inf, dtype=torch.float32)
    pm.clip_grad_value_(1.0)
    assert pm.clip_grad_norm_(1.0).isfinite()
    optimizer.step()
    assert optimizer.step_was_skipped
    pm.close()


@pytest.mark.parametrize(
    ("mesh", "place"),
    [
        ({"p": 2, "d": 2, "zero": 1, "num_microbatches": 2}, (3, 1, 0)),
        ({"p": 2, "d": 2, "num_microbatches": 2}, (0, 0, 0)),
        ({"t": 2, "sequence_parallel": True, "num_microbatches": 2}, (1, 0, 1)),
    ],
    ids=str,
)
@pytest.mark.parametrize("clipped_by", [None, 2.0, inf])
def test_an_infinity_on_one_rank_lets_all_skip(
    mesh: dict[str, Any], place: tuple[int, int, int], clipped_by: float | None
) -> None:
    """`place`: rank, stage and microbatch whose backward makes it (the last one's may start the sum itself). Parameters
    and moments keep all their bits.
    """
    data = batch(8)
    pm, optimizer = start(gpt(2), data, **mesh, initial_loss_scale=SCALE, hysteresis=1)

    def step() -> None:
        pm.step(*data)
        if clipped_by is not None:
            pm.clip_grad_norm_(1.0, clipped_by)
        optimizer.step()
        optimizer.zero_grad()

    step()
    assert not optimizer.step_was_skipped
    before, moments = pm.state_dict(), optimizer.state_dict()
    with planted(pm, place):
        step()
    assert optimizer.step_was_skipped and pm.loss_scale == SCALE / 2
    assert same(pm.state_dict(), before)
    after = optimizer.state_dict()
    for name, known in moments["state"].items():
        assert same(after["state"][name], known), name
    step()
    assert not optimizer.step_was_skipped and optimizer.skipped == 1 and not same(pm.state_dict(), before)
    pm.close()


def planted(pm: autoptd.ParallelModel, place: tuple[int, int, int]) -> Any:
    """Let the backward of one rank, stage and microbatch leave an infinity in a gradient, within a context."""
    rank, stage, microbatch = place
    (executor,) = [held.executor for held in pm.run.started("test").here if held.world.rank == rank]
    backward = executor._do[Kind.B]

    def plant(action: Action) -> None:
        backward(action)
        if (action.stage, action.microbatch) == (stage, microbatch):
            leaf = executor.params.leaves["transformer.wte.weight"]
            assert leaf.grad is not None
            leaf.grad.view(-1)[-1] = float("inf")

    return mock.patch.dict(executor._do, {Kind.B: plant})


def same(found: dict[str, Tensor], known: dict[str, Tensor]) -> bool:
    assert found.keys() == known.keys()
    return all(torch.equal(found[name], x) for name, x in known.items())


def test_scales_are_those_of_torchs_scaler() -> None:
    """In the middle, up to where float32 ends, and down to the least scale."""
    middle = [(seed, 2.0**10, 0.4) for seed in range(4)]
    for seed, first, rate in [*middle, (0, 2.0**125, 0.05), (0, 3.0e38, 0.0), (0, 2.0**-116, 0.25)]:
        theirs = torch.amp.GradScaler("cpu", init_scale=first, growth_interval=3)
        ours = LossScaler(float(torch.tensor(first)), window=3, hysteresis=1, least=2.0**-126)
        weight = nn.Parameter(torch.zeros(2))
        optimizer = torch.optim.SGD([weight], lr=0.0)
        draw = random.Random(seed)
        for _ in range(40):
            theirs.scale(weight.sum())
            worst = draw.choice([inf, float("nan")]) if draw.random() < rate else 1.0
            weight.grad = torch.tensor([1.0, worst])
            ours.renew()
            skipped = ours.settle(weight.grad.norm)
            assert skipped == (not weight.grad.isfinite().all())
            theirs.step(optimizer)
            theirs.update()
            assert ours.value == theirs.get_scale(), (seed, first)


def test_the_second_overflow_halves_by_default_and_two_optimizers_count_one() -> None:
    scale = LossScaler()
    bad, good = torch.tensor(float("nan")), torch.tensor(1.0)
    values = []
    for norm in (bad, bad, bad, good):
        scale.renew()
        scale.saw(norm)
        assert scale.settle(good.clone) == scale.settle(good.clone) == bool(norm.isnan())
        values.append(scale.value)
    assert values == [2.0**16, 2.0**15, 2.0**14, 2.0**14]


def test_a_run_goes_on_with_its_scale() -> None:
    data = batch(4)
    pm, optimizer = start(gpt(2), data, initial_loss_scale=SCALE, loss_scale_window=2)
    for _ in range(3):
        pm.step(*data)
        optimizer.step()
    saved = optimizer.state_dict()
    assert pm.loss_scale == 2 * SCALE
    pm.close()
    other, again = start(gpt(2), data, d=2, initial_loss_scale=4.0, loss_scale_window=2)
    again.load_state_dict(saved)
    assert other.loss_scale == 2 * SCALE
    other.step(*data)
    again.step()
    assert other.loss_scale == 4 * SCALE
    other.close()
    plain, optimizer = start(gpt(2), data, precision="bf16")
    # Made in float16; there is no scale here.
    optimizer.load_state_dict(saved)
    assert plain.loss_scale is None and "loss_scale" not in optimizer.state_dict()
    plain.close()


def test_the_fused_head_keeps_gradients_in_range() -> None:
    """It computes them in forward: without the scale, probabilities of 1 / 32768 are subnormal in float16."""
    torch.manual_seed(0)
    rows, columns = 32, 2**15
    x, weight = torch.randn(rows, 16).half(), (torch.randn(columns, 16) * 1e-2).half()
    targets = torch.arange(rows)
    scale = 2.0**13

    def gradient(told: float | None, dtype: torch.dtype = torch.float16) -> Tensor:
        """Of the rows of the weight that are no target's."""
        own = weight.to(dtype).requires_grad_()
        loss = linear_cross_entropy(x.to(dtype), own, targets, loss_scale=told, dtype=torch.float64)
        loss.backward(torch.full_like(loss, scale))
        assert own.grad is not None
        return own.grad[rows:].double() / scale

    true = gradient(None, torch.float64)
    told, untold = ((gradient(told) - true).norm() / true.norm() for told in (scale, None))
    assert told < 4e-4 and untold > 2 * told


def test_a_sum_that_is_divided_later_does_not_overflow_in_the_fused_head() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(32, 16).half().requires_grad_(), torch.randn(64, 16).half().requires_grad_()
    targets = torch.randint(64, (32,))
    loss = linear_cross_entropy(x, weight, targets, reduction="sum", loss_scale=2.0**17, dtype=torch.float32)
    found = torch.autograd.grad(loss / 512, (x, weight), torch.tensor(2.0**17))
    assert all(bool(gradient.isfinite().all()) for gradient in found)


class CastThenView(nn.Module):
    """Logits as Hugging Face has them: cast, then viewed; large enough for the fused head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(16384, 16), nn.Linear(16, 16384, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.embed(ids)).float()
        return F.cross_entropy(logits.view(-1, 16384), labels.view(-1))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_loss_in_float32_stays_in_float32(precision: str) -> None:
    torch.manual_seed(0)
    model, data = CastThenView(), (torch.randint(16384, (128, 8)), torch.randint(16384, (128, 8)))
    pm, optimizer = start(model, data, precision=precision, num_microbatches=1)
    assert "linear_cross_entropy" in pm.program.sources["stage_0.py"]
    loss = pm.step(*data)
    optimizer.step()
    assert loss.dtype == torch.float32 and not optimizer.step_was_skipped
    torch.testing.assert_close(loss, model(*data).detach(), rtol=2e-3, atol=0)
    pm.close()


@pytest.mark.parametrize(
    "keywords", [{"precision": "bf16"}, {"precision": None, "zero": 1, "d": 2}, {}], ids=str
)
def test_a_closure_is_refused(keywords: dict[str, Any]) -> None:
    pm, optimizer = start(gpt(2), batch(4), **keywords)
    with pytest.raises(PlanError, match="does not take a closure"):
        optimizer.step(lambda: pm.step(*batch(4)))
    pm.close()


def test_a_smaller_window_is_passed_at_once() -> None:
    long, short = LossScaler(4.0, window=100), LossScaler(4.0, window=10)
    for _ in range(50):
        long.renew()
        long.settle(lambda: torch.tensor(1.0))
    short.load_state_dict(long.state_dict())
    short.renew()
    short.settle(lambda: torch.tensor(1.0))
    assert short.value == 8.0


def test_what_cannot_be_is_refused() -> None:
    def refused(match: str, **keywords: Any) -> None:
        with pytest.raises(PlanError, match=match):
            autoptd.parallelize(gpt(2), backend="local", example_inputs=batch(), **keywords)

    refused("there is no loss scale with precision='bf16'", precision="bf16", loss_scale=2.0)
    refused("there is no loss scale with precision=None", hysteresis=3)
    refused("is a fixed scale", precision="fp16", loss_scale=2.0, loss_scale_window=3)
    refused("not a positive number", precision="fp16", loss_scale=-1.0)
    refused("not a positive number of float32", precision="fp16", initial_loss_scale=2.0**128)
    refused("not a positive number of float32", precision="fp16", min_loss_scale=2.0**-127)
    refused("is above initial_loss_scale", precision="fp16", min_loss_scale=2.0**20)
    with pytest.raises(PlanError, match="float64"):
        autoptd.parallelize(gpt(2).double(), precision="fp16", backend="local", example_inputs=batch())


class Overflowing(nn.Module):
    """Has a loss of 316, and gradients of more than float16 holds."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Embedding(16, 8)

    def forward(self, ids: Tensor) -> Tensor:
        return ((self.up(ids) * 1e-3).square().mean(-1) + 1e-5).rsqrt().mean()


def test_verify_compares_one_loss_where_the_update_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_module, "CHECKS", ("own dtype",))
    torch.manual_seed(0)
    model, ids = Overflowing(), torch.arange(16).reshape(8, 2)
    report = autoptd.verify(model, d=2, precision="fp16", fuse=False, example_inputs=(ids,), steps=2)
    own = [found for found in report.differences if found.what == "own dtype"]
    assert report.passed and [found.step for found in own] == [0]
