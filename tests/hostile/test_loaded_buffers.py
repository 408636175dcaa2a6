"""Buffers that change after compiling: what was proven of them is held to the values that are loaded, evaluation too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autoptd
from autoptd.errors import PlanError
from autoptd.options import Options
from autoptd.program.program import Program

X = torch.randint(0, 32, (8, 6), generator=torch.Generator().manual_seed(0))
Y = torch.randint(0, 32, (8, 6), generator=torch.Generator().manual_seed(1))


class Windowed(nn.Module):
    """Attention by a mask that a buffer holds: causal where the window is the whole row."""

    def __init__(self, window: int, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.emb, self.head = nn.Embedding(32, 16).double(), nn.Linear(16, 32).double()
        mask = torch.ones(6, 6, dtype=torch.bool).tril()
        self.register_buffer("mask", mask & ~mask.tril(-window))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        q = self.emb(x).unflatten(-1, (4, 4)).transpose(1, 2)
        h = F.scaled_dot_product_attention(q, q, q, attn_mask=self.mask).transpose(1, 2).flatten(2)
        return F.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


class Evaluated(Windowed):
    """Causal in training; evaluation has a mask of its own, a shift, and a buffer that only it reads."""

    def __init__(self, window: int, shift: float = 0.0, seed: int = 0) -> None:
        super().__init__(window, seed)
        self.register_buffer("shift", torch.full((16,), shift, dtype=torch.float64))
        self.register_buffer("bias", torch.full((32,), shift, dtype=torch.float64))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(6, 6, dtype=torch.bool).tril() if self.training else self.mask
        q = (self.emb(x) - self.shift).unflatten(-1, (4, 4)).transpose(1, 2)
        h = F.scaled_dot_product_attention(q, q, q, attn_mask=mask).transpose(1, 2).flatten(2)
        logits = self.head(h) if self.training else self.head(h) + self.bias.cumsum(0)
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())


class Rotary(nn.Module):
    """A persistent table of frequencies, of which the compiler asks whether its rows are equal; scales and an index."""

    def __init__(self, base: float, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.emb, self.head = nn.Embedding(32, 16).double(), nn.Linear(16, 32).double()
        self.layers = nn.ModuleList(nn.Linear(16, 16).double() for _ in range(2))
        self.register_buffer("inv_freq", base ** -(torch.arange(8, dtype=torch.float64) / 8))
        self.register_buffer("temperature", torch.tensor(base / 10, dtype=torch.float64))
        self.register_buffer("order", torch.arange(16).roll(int(base)))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(6)[None].expand(x.shape[0], -1)
        angles = positions[..., None] * self.inv_freq
        h = self.emb(x)[..., self.order] * torch.cat([angles.cos(), angles.sin()], -1) / self.temperature
        for layer in self.layers:
            h = h + layer(h).tanh()
        return F.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


MESHES = [{"t": 2}, {"p": 2, "d": 2}, {"t": 2, "p": 2}]


def parallel(model: nn.Module, **keywords: Any) -> autoptd.ParallelModel:
    keywords = {"t": 2, **keywords} if "p" not in keywords else keywords
    return autoptd.parallelize(model, backend="local", example_inputs=(X, Y), **keywords)


def losses(model: nn.Module) -> tuple[float, float]:
    """In training and in evaluation."""
    with torch.no_grad():
        evaluated = float(model.eval()(X, Y))
        return float(model.train()(X, Y)), evaluated


def of(pm: autoptd.ParallelModel) -> tuple[float, float]:
    return float(pm.step(X, Y)), float(pm.eval_step(X, Y))


@pytest.mark.parametrize("fuse", ["eager", False])
def test_another_mask_than_the_proven_one_is_refused_before_anything_is_loaded(fuse: str | bool) -> None:
    trained, model = Windowed(2, seed=1), Windowed(6)
    pm = parallel(model, fuse=fuse)
    if not fuse:  # nobody has looked at it: it is data
        pm.load_state_dict(trained.state_dict())
        assert of(pm) == pytest.approx(losses(trained), rel=1e-12)
        return
    with pytest.raises(PlanError, match=r"brings other values of mask, .*Remedy: load them before"):
        pm.load_state_dict(trained.state_dict())
    assert of(pm) == pytest.approx(losses(model), rel=1e-12)
    assert torch.equal(pm.state_dict()["mask"], model.mask)
    other = Windowed(6, seed=1)  # other weights with the same mask
    pm.load_state_dict(other.state_dict())
    assert of(pm) == pytest.approx(losses(other), rel=1e-12)


def test_a_model_changed_in_place_does_not_hide_what_is_loaded() -> None:
    model, trained = Windowed(6), Windowed(2)
    pm = parallel(model)
    model.load_state_dict(trained.state_dict())
    with pytest.raises(PlanError, match="other values of mask"):
        pm.load_state_dict(model.state_dict())


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_rotary_tables_scales_and_indices_may_be_loaded(mesh: dict[str, int]) -> None:
    model, trained = Rotary(10.0), Rotary(20.0, seed=1)
    pm = parallel(model, **mesh)
    assert of(pm) == pytest.approx(losses(model), rel=1e-12)
    pm.load_state_dict(trained.state_dict())
    assert of(pm) == pytest.approx(losses(trained), rel=1e-12)
    pm.load_state_dict(model.state_dict())  # and back
    assert of(pm) == pytest.approx(losses(model), rel=1e-12)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("evaluated_before", [False, True])
def test_evaluation_takes_what_was_loaded(mesh: dict[str, int], evaluated_before: bool) -> None:
    model, trained = Evaluated(6), Evaluated(2, shift=0.5, seed=1)
    pm = parallel(model, **mesh)
    if evaluated_before:
        assert float(pm.eval_step(X, Y)) == pytest.approx(losses(model)[1], rel=1e-12)
    pm.load_state_dict(trained.state_dict())
    assert of(pm) == pytest.approx(losses(trained), rel=1e-12)
    again = Evaluated(3, shift=-0.25, seed=2)
    pm.load_state_dict(again.state_dict())
    assert of(pm) == pytest.approx(losses(again), rel=1e-12)
    assert torch.equal(pm.state_dict()["mask"], again.mask)
    # The first model, which evaluation is compiled of, is as it was.
    assert torch.equal(model.mask, Evaluated(6).mask) and model.shift.eq(0).all()


def test_evaluation_does_not_follow_the_first_model() -> None:
    model = Evaluated(6)
    pm = parallel(model)
    wanted = losses(model)
    with torch.no_grad():
        model.mask.copy_(Evaluated(2).mask)
        model.shift.fill_(7)
        model.bias.fill_(7)
    assert of(pm) == pytest.approx(wanted, rel=1e-12)


def test_a_program_from_disk_takes_the_buffers_of_the_state(tmp_path: Path) -> None:
    options = Options(t=2, backend="local")
    autoptd.compile(Rotary(10.0), t=2, example_inputs=(X, Y)).save(tmp_path / "rotary")
    trained = Rotary(10.0, seed=1)
    trained.temperature.fill_(3.0)
    pm = autoptd.ParallelModel(Program.load(tmp_path / "rotary"), options, trained.state_dict())
    assert of(pm) == pytest.approx(losses(trained), rel=1e-12)
    assert float(pm.state_dict()["temperature"]) == 3.0

    autoptd.compile(Windowed(6), t=2, example_inputs=(X, Y)).save(tmp_path / "causal")
    loaded = Program.load(tmp_path / "causal")
    with pytest.raises(PlanError, match="compiled for other values of mask than the model has"):
        autoptd.ParallelModel(loaded, options, Windowed(2).state_dict())
    pm = autoptd.ParallelModel(loaded, options, Windowed(6, seed=3).state_dict())
    with pytest.raises(PlanError, match=r"other values of mask, .* was compiled for others"):
        pm.load_state_dict(Windowed(2).state_dict())


def test_weights_that_bring_another_mask(tmp_path: Path) -> None:
    trained = Windowed(2, seed=1)
    save = pytest.importorskip("safetensors.torch").save_file
    save(trained.state_dict(), tmp_path / "model.safetensors")
    pm = parallel(Windowed(6), weights=tmp_path)
    assert of(pm) == pytest.approx(losses(trained), rel=1e-12)


def test_a_model_that_is_compiled_at_its_first_step_has_the_buffers_that_it_was_given_with() -> None:
    model = Windowed(6)
    wanted = losses(model)
    pm = autoptd.parallelize(model, t=2, backend="local")
    model.mask = Windowed(2).mask
    assert of(pm) == pytest.approx(wanted, rel=1e-12)
