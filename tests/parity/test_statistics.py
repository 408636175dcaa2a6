"""Deviations and norms of inputs over the batch are those of the whole batch, whatever it is divided into."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoptd
from autoptd.runtime.step.per_step import set_batch_sums
from autoptd.runtime.step.stage import Largest
from tests.hostile.against_torch import assert_near, assert_parity, wide

Weights = Callable[[Tensor], Tensor]
WEIGHTS: dict[str, Weights] = {
    "advantages": lambda r: (r - r.mean()) / (r.std() + 1e-4),
    "of one a row": lambda r: (r[:, 0] / (1 + r[:, 0].std(unbiased=False)))[:, None],
    "variance": lambda r: r / (1 + r.var(0, correction=0, keepdim=True)) + torch.var(r, (0, 1), correction=2),
    "of another": lambda r: r / ((r - r.mean(0)) / r.std(0)).abs().std(),
    "norm": lambda r: r / r.norm() + F.normalize(r, dim=0) + F.normalize(r, p=1.0, dim=0),
    "linalg": lambda r: r / torch.linalg.norm(r) + r / torch.linalg.norm(r[:, 0], 3),
    "largest": lambda r: r / r.abs().max() + r.amin(0) * (r > r.amax((0, 1), keepdim=True) - 1),
    "both": lambda r: (r - r.min()) / (r.max() - r.min()) + sum(torch.aminmax(r, dim=0, keepdim=True)),
    "of a dim": lambda r: r * r.max(0).values / (1 + r.min(dim=0, keepdim=True)[0]),
    "whole numbers": lambda r: (
        r * (r * 100).long().max() / (9 + (r * 9).int().amin(0).abs()) + (r > 1.5).any()
    ),
    "bools": lambda r: r * (r > -9).all() + r * (r[:, :1] > 0).all(0) + r * (r > 1).any(0),
    "softmax": lambda r: r.softmax(0) + torch.log_softmax(r[:, 0], 0)[:, None],
    "of all": lambda r: (
        r * r.flatten().softmax(0).view_as(r) / r.logsumexp((0, 1)) + r.logsumexp(0, keepdim=True)
    ),
    "pairs": lambda r: (
        (r - torch.std_mean(r)[1]) / torch.std_mean(r)[0] + torch.var_mean(r, 0, keepdim=True)[0]
    ),
    "largest norm": lambda r: (
        r / r.norm(float("inf")) + r / torch.linalg.vector_norm(r, -float("inf"), dim=0)
    ),
    "count": lambda r: r / torch.linalg.vector_norm(r.clamp(min=0), 0),
    "of a sum": lambda r: r / r.sum(0).amax() + r / (r - r.mean()).abs().max(),
    "of rows": lambda r: (r - r.mean(1, keepdim=True)) / r.std(1, keepdim=True),
}
MESHES: list[dict[str, Any]] = [
    {"d": 2, "num_microbatches": 2},
    {"p": 2, "num_microbatches": 4},
    {"c": 2, "num_microbatches": 2},
    {"t": 2, "d": 2, "zero": 1, "num_microbatches": 1},
]


class Policy(nn.Module):
    """Log-probabilities of tokens, weighted by a function of rewards."""

    def __init__(self, weights: Weights) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.emb, self.layer, self.head = nn.Embedding(32, 16), nn.Linear(16, 16), nn.Linear(16, 32)
        self.weights = weights

    def forward(self, ids: Tensor, rewards: Tensor) -> Tensor:
        h = self.emb(ids)
        scores = self.head(h + self.layer(h).tanh()).log_softmax(-1)
        return -(scores.gather(-1, ids[..., None]).squeeze(-1) * self.weights(rewards)).mean()


def data(seed: int, rows: int = 8) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(seed)
    return torch.randint(0, 32, (rows, 6), generator=source), torch.randn(rows, 6, generator=source)


@pytest.mark.one_in(19)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", WEIGHTS)
def test_the_models_numbers(name: str, mesh: dict[str, Any]) -> None:
    assert_parity(Policy(WEIGHTS[name]), [data(0), data(1)], **mesh)


def test_all_in_one() -> None:
    """What mutations are planted against: every form, in one model."""

    def weights(rewards: Tensor) -> Tensor:
        return sum((one(rewards) for one in WEIGHTS.values()), torch.zeros(()))

    assert_parity(Policy(weights), [data(0)], **MESHES[0])


@pytest.mark.parametrize("name", ["advantages", "both"])
def test_evaluation_and_other_lengths(name: str) -> None:
    """Fewer rows and more, of the same model: numbers of rows are those of each batch."""
    model = Policy(WEIGHTS[name]).double()
    pm = autoptd.parallelize(
        model, d=2, shapes="exact", backend="local", num_microbatches=2, example_inputs=wide(data(0))
    )
    for rows in (8, 4, 12):
        batch = wide(data(rows, rows))
        wanted = {"loss": model(*batch).detach()}
        assert_near({"loss": pm.step(*batch)}, wanted, 1e-3)
        assert_near({"loss": pm.eval_step(*batch)}, wanted, 1e-3)
    pm.close()


@pytest.mark.one_in(1)
@pytest.mark.parametrize("d", [2, 4])
def test_evaluations_in_which_a_replica_has_no_rows(d: int) -> None:
    """The largest of negative numbers is none of its zeros."""
    model = Policy(lambda r: r / r.max() + r.sum() + r.softmax(0)).double()
    pm = autoptd.parallelize(model, d=d, backend="local", num_microbatches=2, example_inputs=wide(data(0)))
    for rows in (1, 3, 5, 8):
        ids, rewards = wide(data(rows, rows))
        wanted = {"loss": model(ids, -rewards.abs()).detach()}
        assert_near({"loss": pm.eval_step(ids, -rewards.abs())}, wanted, 1e-3)
    pm.close()


class Maxima:
    """A stage with a round of two largest entries."""

    def __init__(self) -> None:
        self.sums: dict[int, Tensor] = {}
        self.rounds = [lambda x: {0: Largest(x.amax(0))}]


def test_a_nan_is_the_largest_although_a_backend_drops_it() -> None:
    stage, seen = Maxima(), []

    def reduce(own: Tensor, op: str) -> Tensor:
        # As NCCL and gloo may: of a NaN and a number, the number.
        seen.append(op)
        return torch.fmax(own, torch.zeros_like(own))

    set_batch_sums(stage, [{"x": torch.tensor([[math.nan, -1.0, 2.0]])}], reduce)  # type: ignore[arg-type]
    assert seen == ["max"] and stage.sums[0][0].isnan() and stage.sums[0][1:].tolist() == [0.0, 2.0]


def test_infinities() -> None:
    """Masked numbers of a softmax, and a column of nothing else for logsumexp, as torch has them."""

    def weights(rewards: Tensor) -> Tensor:
        masked = rewards.masked_fill(rewards < 0, -float("inf"))
        none = rewards.masked_fill(rewards.abs() < 99, -float("inf"))
        return masked.softmax(0) + masked.logsumexp(0).exp() + none.logsumexp(0).exp() + masked.amax(0).exp()

    assert_parity(Policy(weights), [data(0), data(1)], d=2, num_microbatches=2)


@pytest.mark.parametrize("of", ["argmax", "max and places", "median"])
def test_places_of_largest_entries_take_one_microbatch(of: str) -> None:
    forms: dict[str, Weights] = {
        "argmax": lambda r: r * r[:, 0].argmax(0),
        "max and places": lambda r: r * sum(r[:, 0].max(0)),
        "median": lambda r: r * r.median(),
    }
    with pytest.raises(
        autoptd.PlanError, match=r"(mixes the samples of|its operand carries) the batch.*num_microbatches=1"
    ):
        autoptd.compile(Policy(forms[of]), num_microbatches=2, example_inputs=data(0))
    assert_parity(Policy(forms[of]), [data(0)], num_microbatches=1, t=2)


def test_half_precision_is_summed_wide() -> None:
    """As torch computes them: squares of these overflow float16."""
    model = Policy(lambda r: (r.half() * 300).std().float() * r)
    pm = autoptd.parallelize(model, d=2, num_microbatches=2, backend="local", example_inputs=data(0))
    torch.testing.assert_close(pm.step(*data(1)), model(*data(1)).detach(), rtol=1e-3, atol=1e-3)
    pm.close()
