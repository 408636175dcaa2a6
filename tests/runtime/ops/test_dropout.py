"""Dropout as a run has it: the same masks in every layout, new ones at every step, none in evaluations."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import autoptd
from autoptd import runtime as rt
from autoptd.ir.types import Zigzag
from autoptd.runtime.ops import fused
from autoptd.runtime.ops.dropout import Draw, bias_dropout_add, dropout
from autoptd.runtime.ops.shards import take_shard
from tests.parity.models import batch, dropping_gpt
from tests.parity.test_dropout import styled

Masks = dict[tuple[int, int], torch.Tensor]  # (step, site) -> the mask of the global value
Parts = dict[tuple[int, int], dict[tuple[int, int], tuple[torch.Tensor, Any, Any]]]


def run(model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch, steps: int = 1, **keywords: Any) -> Masks:
    """Train for some steps, and put the masks of all microbatches and ranks together."""
    parts: Parts = {}

    def record(
        x: torch.Tensor, rate: float, draw: Draw, batch: Any = None, shard: Any = None, group: Any = None
    ) -> torch.Tensor:
        if x.is_meta:
            # Evaluated without numbers, to learn what it saves.
            return dropout(x, rate, draw, batch, shard, group)
        mask = dropout(torch.ones_like(x), rate, draw, batch, shard, group) != 0
        place = (draw.first_row if batch is not None else 0, group.index if shard is not None else 0)
        seen = parts.setdefault((draw.step, draw.site), {})
        # Equal on every rank that holds it.
        assert torch.equal(seen.setdefault(place, (mask, batch, shard))[0], mask)
        return dropout(x, rate, draw, batch, shard, group)

    def record_fused(
        x: torch.Tensor, bias: Any, residual: torch.Tensor, *how: Any, backend: str, **where: Any
    ) -> Any:
        record(x, *how, **where)
        return bias_dropout_add(x, bias, residual, *how, backend=backend, **where)

    monkeypatch.setattr(rt, "dropout", record)
    monkeypatch.setattr(fused, "bias_dropout_add", record_fused)
    pm = autoptd.parallelize(model, backend="local", example_inputs=batch(), **keywords)
    for _ in range(steps):
        pm.step(*batch())
    pm.close()
    return {key: join(seen) for key, seen in parts.items()}


def join(seen: dict[tuple[int, int], tuple[torch.Tensor, Any, Any]]) -> torch.Tensor:
    _, at, shard = next(iter(seen.values()))
    firsts, indices = sorted({first for first, _ in seen}), sorted({index for _, index in seen})
    at = (at, 1) if isinstance(at, int) else at
    wholes = []
    for index in indices:
        rows = [seen[first, index][0] for first in firsts]
        wholes.append(rt.join_shards(rows, *at) if at is not None else rows[0])
    if shard is None:
        return wholes[0]
    times = len(firsts) if at is not None and at < shard and at[0] == shard[0] else 1
    return rt.join_shards(wholes, shard[0], shard[1] * times)


LAYOUTS: list[dict[str, int]] = [
    {"num_microbatches": 4},
    {"t": 2, "num_microbatches": 2},
    {"d": 2, "num_microbatches": 4},
    {"p": 2, "v": 2, "d": 2},
    {"t": 4, "p": 2, "d": 2, "num_microbatches": 2},
]


@pytest.mark.one_in(99)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_draws_the_same_masks(layout: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = run(dropping_gpt(), monkeypatch, steps=2, num_microbatches=1)
    found = run(dropping_gpt(), monkeypatch, steps=2, **layout)
    assert sorted(found) == sorted(wanted) == [(step, site) for step in (1, 2) for site in range(13)]
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)


FOLDS = [
    "tokens_folded",
    "sequence_first",
    "batch_and_heads_folded",
    "heads_before_batch",
    "parameters_dropped",
]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", [*FOLDS, "constants_dropped"])
def test_every_fold_of_the_batch_draws_the_same_masks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = run(styled(name), monkeypatch, num_microbatches=1)
    found = run(styled(name), monkeypatch, t=2, d=2, num_microbatches=2)
    assert sorted(found) == sorted(wanted)
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)


def losses(pm: Any, count: int) -> list[float]:
    return [float(pm.step(*batch())) for _ in range(count)]


def test_steps_seeds_and_resumed_runs() -> None:
    """Weights stay as they are: the losses tell the masks apart."""
    with_seed = {}
    for seed in (0, 1):
        pm = autoptd.parallelize(dropping_gpt(2), d=2, seed=seed, backend="local", example_inputs=batch())
        with_seed[seed] = losses(pm, 4)
        assert pm.steps == 4 and len(set(with_seed[seed])) == 4
        pm.steps = 2
        assert losses(pm, 2) == with_seed[seed][2:]
        pm.close()
    assert not set(with_seed[0]) & set(with_seed[1])
    resumed = autoptd.parallelize(dropping_gpt(2), p=2, backend="local", example_inputs=batch())
    resumed.steps = 3
    assert losses(resumed, 1) == pytest.approx(with_seed[0][3:], rel=1e-5)
    resumed.close()


def test_evaluations_drop_nothing() -> None:
    model = dropping_gpt(2)
    pm = autoptd.parallelize(model, p=2, backend="local", example_inputs=batch())
    wanted = model.eval()(*batch())[1]
    assert torch.allclose(pm.eval_step(*batch()), wanted, rtol=1e-6)
    pm.close()


def test_the_next_step_after_a_bad_one_draws_new_masks() -> None:
    pm = autoptd.parallelize(dropping_gpt(1), backend="local", example_inputs=batch())
    first = losses(pm, 1)
    for parameter in pm.parameters():
        parameter.grad = None
    state = pm.state_dict()
    pm.load_state_dict({name: torch.full_like(x, torch.nan) for name, x in state.items()})
    with pytest.raises(autoptd.RuntimeFault, match="NaN"):
        pm.step(*batch())
    pm.load_state_dict(state)
    assert pm.steps == 2 and losses(pm, 1) != first
    pm.close()


def test_without_a_draw_nothing_is_dropped() -> None:
    x = torch.randn(2, 3)
    assert dropout(x, 0.5, None, 0) is x


def test_backward_goes_through_the_same_mask() -> None:
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    draw = Draw(0, 1, 2, 0, 4)
    y = dropout(x, 0.4, draw, 0)
    (gradient,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert torch.equal(gradient * x.detach(), y.detach())
    assert 0 < int((gradient == 0).sum()) < 24
    assert torch.autograd.gradcheck(lambda one: dropout(one, 0.4, draw, 0), (x,))


@pytest.mark.parametrize("batch", [0, 1, (1, 2), None])
@pytest.mark.parametrize("shard", [None, (2, 1)])
def test_the_fused_end_of_a_block_draws_the_same_masks(batch: Any, shard: tuple[int, int] | None) -> None:
    """With a bias and a residual in the same operator; the batch along several dims, the columns split over ranks."""
    x, bias, residual = torch.randn(4, 4, 6), torch.randn(6), torch.randn(4, 4, 6)
    draw = Draw(seed=1, step=2, site=3, first_row=8, rows=2 if batch == (1, 2) else 4)
    tp: Any = SimpleNamespace(size=2, index=1)
    wanted = residual + dropout(x + bias, 0.4, draw, batch, shard, tp)
    assert torch.equal(bias_dropout_add(x, bias, residual, 0.4, draw, batch, shard, tp), wanted)
    assert torch.equal(bias_dropout_add(x, bias, residual, 0.4, None), residual + (x + bias))


CUTS: list[Any] = [  # [rows, heads, tokens, size] as (dim, entries before) of each cut, outermost first
    ((1, 1), (2, 1)),
    ((2, 1), (2, 1)),
    ((1, 1), (1, 1)),
    ((1, 2), (2, 1)),
    ((1, 1), (3, 1)),
    ((2, 1), (3, 2)),
    ((2, Zigzag()), (2, 1)),
    ((1, 1), (2, Zigzag())),
    ((1, Zigzag(2)), (3, 2)),
    ((0, Zigzag()), (1, Zigzag(2))),
]


# Where the rows are, ranks do not cut: the batch does.
@pytest.mark.parametrize(
    ("cuts", "rows_at"),
    [(cuts, rows_at) for cuts in CUTS for rows_at in (0, 2) if all(dim != rows_at for dim, _ in cuts)],
    ids=str,
)
def test_shards_of_two_axes_draw_parts_of_one_mask(cuts: tuple[tuple[int, int], ...], rows_at: int) -> None:
    """To the bit: as `take_shard` cuts the whole mask, the outer axis first."""
    degrees, draw = (2, 3), Draw(0, 1, 5, 0, 12 if rows_at == 2 else 4)
    x = torch.ones(4, 24, 12, 12, dtype=torch.float64)
    whole = dropout(x, 0.4, draw, rows_at)
    for indices in itertools.product(*map(range, degrees)):
        mine, ones = whole, x
        for (dim, entries), degree, index in zip(cuts, degrees, indices, strict=True):
            mine, ones = (take_shard(y, dim, entries, index, degree) for y in (mine, ones))
        groups = tuple(SimpleNamespace(size=size, index=i) for size, i in zip(degrees, indices, strict=True))
        assert torch.equal(dropout(ones, 0.4, draw, rows_at, cuts, groups), mine)  # type: ignore[arg-type]
