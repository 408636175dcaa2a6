"""Random numbers of a model beside dropout: any layout trains as the unmodified model does that draws the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoptd
from autoptd.errors import PlanError
from autoptd.ir.machine import Machine
from autoptd.kernels.dropout import draw
from autoptd.kernels.dropout_mask import Places, Shard, keys
from autoptd.runtime.step.stage import load_stage
from autoptd.runtime.step.standalone import check_stage

# Collectives start at once: models as small as these are split.
MACHINE = Machine(latency=1e-9)
VOCAB, WIDTH, LENGTH = 30, 16, 8
CPU = torch.device("cpu")
KINDS = ("uniform", "normal", "exponential")


class Noisy(nn.Module):
    """What people do with random numbers in a decoder, most of it at once."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        if self.training:
            # NEFTune; a number for each sample; noise of a latent; a choice by rejection; Gumbel noise.
            x = x + torch.zeros_like(x).uniform_(-1, 1) * 0.1
            x = x * (torch.rand(x.shape[0], 1, 1, dtype=x.dtype) + 0.5)
        y = self.up(x)
        if self.training:
            torch.rand_like(y)
            y = y * (1 + 0.1 * torch.randn_like(y)) + torch.empty_like(y).normal_(0.1, 0.2)
        y = self.drop(F.gelu(y))
        if self.training:
            y = torch.where(torch.rand_like(y).uniform_() > 0.75, y, -y)
            y = y - 0.01 * torch.empty_like(y).exponential_(2.0).log()
            # Of no row of the batch: the same for all.
            y = y + torch.randn(2 * WIDTH, dtype=y.dtype)
        return F.cross_entropy(self.head(x + self.down(y)).flatten(0, 1), labels.flatten())


def batch(rows: int = 4) -> dict[str, Tensor]:
    ids = torch.randint(VOCAB, (rows, LENGTH), generator=torch.Generator().manual_seed(0))
    return {"ids": ids, "labels": ids.roll(-1, 1)}


MESHES: tuple[dict[str, Any], ...] = (
    {"t": 2, "p": 2, "d": 2, "num_microbatches": 2},
    {"t": 2, "sequence_parallel": True, "d": 2, "zero": 1},
    {"t": 2, "c": 2, "recompute": "full"},
    {"num_microbatches": 4},
    {"t": 4, "precision": "bf16-mixed"},
)


@pytest.mark.parametrize("mesh", MESHES, ids=[str(mesh) for mesh in MESHES])
def test_every_mesh_draws_what_one_device_draws(mesh: dict[str, Any]) -> None:
    torch.manual_seed(0)
    autoptd.verify(Noisy(), example_inputs=batch(), machine=MACHINE, steps=2, **mesh)


def test_nothing_is_drawn_in_an_evaluation() -> None:
    torch.manual_seed(0)
    model = Noisy().double()
    pm = autoptd.parallelize(model, t=2, p=2, example_inputs=batch(), backend="local")
    pm.step(**batch())
    assert abs(float(pm.eval_step(**batch())) - float(model.eval()(**batch()))) < 1e-9
    pm.close()


def test_a_stage_draws_by_itself(tmp_path: Path) -> None:
    program = autoptd.compile(Noisy(), t=2, machine=MACHINE, example_inputs=batch())
    program.save(tmp_path)
    assert "rt.uniform(" in program.sources["stage_0.py"]
    stage = load_stage(program.sources["stage_0.py"], str(tmp_path / "stage_0.py"))
    assert not check_stage(stage, tmp_path).wrong


def test_other_seeds_and_steps_draw_other_numbers() -> None:
    torch.manual_seed(0)
    model, losses = Noisy(), []
    for seed in (0, 1):
        pm = autoptd.parallelize(model, t=2, seed=seed, example_inputs=batch(), backend="local")
        losses += [float(pm.step(**batch())), float(pm.step(**batch()))]
        pm.close()
    assert len(set(losses)) == 4


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_draw_parts_of_the_same_numbers_to_the_bit(kind: str) -> None:
    """[2, 6, 12] with rows in the middle; over 3 ranks in blocks of 4 columns, and the last rows alone."""
    named = keys(0, 3, 7)
    whole = draw(kind, (2, 6, 12), Places(*named), torch.float32, CPU)
    assert torch.equal(whole[:, 4:], draw(kind, (2, 2, 12), Places(*named, first_row=4), torch.float32, CPU))
    for rank in range(3):
        part = draw(kind, (2, 6, 4), Places(*named, 0, *Shard(4, 3, rank)), torch.float32, CPU)
        assert torch.equal(whole[..., 4 * rank : 4 * rank + 4], part)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_dtypes_round_the_same_numbers(kind: str, dtype: torch.dtype) -> None:
    args = (1, 64, 512), Places(*keys(0, 1, 2))
    found, wanted = draw(kind, *args, dtype, CPU).double(), draw(kind, *args, torch.float32, CPU).double()
    eps = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
    assert ((found - wanted).abs() <= 2 * eps * wanted.abs().clamp(min=1.0)).all()
    assert kind != "uniform" or float(found.max()) < 1.0


@pytest.mark.parametrize(
    ("kind", "cdf"),
    [
        ("uniform", lambda x: x),
        ("normal", torch.special.ndtr),
        ("exponential", lambda x: 1 - torch.exp(-x)),
    ],
)
def test_numbers_are_distributed_as_torch_says(kind: str, cdf: Callable[[Tensor], Tensor]) -> None:
    """Kolmogorov and Smirnov's distance of a million numbers, and neighbours that know nothing of each other."""
    found = draw(kind, (1, 1000, 1000), Places(*keys(0, 1, 2)), torch.float64, CPU)[0]
    assert found.isfinite().all() and (kind == "normal" or found.min() >= 0)
    shares = cdf(found.flatten().sort().values)
    assert float((shares - torch.linspace(0, 1, shares.numel(), dtype=torch.float64)).abs().max()) < 2e-3
    centred = (found - found.mean()) / found.std()
    for neighbour in (centred.roll(1, 0), centred.roll(1, 1)):
        assert abs(float((centred * neighbour).mean())) < 5e-3


class Own(nn.Module):
    def __init__(self, noise: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.noise = nn.Linear(WIDTH, WIDTH), noise

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) + self.noise(x)).square().mean()


GENERATOR = torch.Generator()


@pytest.mark.parametrize(
    ("noise", "fact"),
    [
        (lambda x: torch.randint_like(x, 3), "random operator"),
        (lambda x: torch.poisson(x.abs()), "random operator"),
        (lambda x: torch.empty_like(x).cauchy_(), "random operator"),
        (lambda x: torch.randperm(WIDTH) * x, "random operator"),
    ],
)
def test_other_random_operators_are_refused(noise: Callable[[Tensor], Tensor], fact: str) -> None:
    with pytest.raises(PlanError, match=fact):
        autoptd.compile(Own(noise), t=2, example_inputs=torch.randn(4, WIDTH))


def test_a_generator_of_the_models_own_is_refused() -> None:
    def noise(x: Tensor) -> Tensor:
        return torch.zeros_like(x).uniform_(generator=GENERATOR)

    with pytest.raises(autoptd.AutoptdError, match="own generator"):
        autoptd.compile(Own(noise), t=2, example_inputs=torch.randn(4, WIDTH))


def test_numbers_in_eval_mode_are_refused_there() -> None:
    pm = autoptd.parallelize(Own(torch.rand_like), t=2, example_inputs=torch.randn(4, WIDTH), backend="local")
    with pytest.raises(PlanError, match="random numbers are drawn in eval mode"):
        pm.eval_step(torch.randn(4, WIDTH))
    pm.close()
