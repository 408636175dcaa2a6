"""What checkpoints are tried on: models, optimizers, and a loop of steps."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import autoptd
from autoptd.compat import tree_map
from autoptd.compiler import compiler
from autoptd.compiler.driver import compile_program
from autoptd.ir.buffers import digest
from autoptd.options import Options, grouped
from autoptd.program.program import Program
from autoptd.runtime.params.guard import unguarded
from autoptd.runtime.params.parts import shard_of
from tests.parity.models import batch, gpt

VOCAB = 61
PROGRAMS: dict[str, Program] = {}


def tied_gpt(dtype: torch.dtype = torch.float64) -> nn.Module:
    """Fused q|k|v, tied embeddings whose 61 rows no t divides, one frozen parameter."""
    model = gpt(layers=2, vocab=VOCAB).to(dtype)
    model.transformer.h[0].ln_1.bias.requires_grad_(False)
    return model


def running(
    model: nn.Module | None = None,
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW,
    settings: dict[str, Any] | None = None,
    **keywords: Any,
) -> tuple[autoptd.ParallelModel, torch.optim.Optimizer]:
    """The model on a mesh of threads, and its optimizer."""
    keywords = grouped({"backend": "local", "timeout": 30, "example_inputs": data(0), **keywords})
    if model is None:
        model = tied_gpt(torch.float32 if "precision" in keywords else torch.float64)
    with mock.patch.object(compiler, "compile_program", compiled_once):
        pm = autoptd.parallelize(model, **keywords)
    return pm, pm.optimizer(optimizer, **(settings or {"lr": 1e-2}))


def compiled_once(model: nn.Module, options: Options, *call: Any, **keywords: Any) -> Program:
    """Compile a model for a mesh, or return the program of an earlier test: it is data, and no run changes it."""
    about = [
        f"{name} {x.dtype} {x.requires_grad}" for name, x in model.named_parameters(remove_duplicate=False)
    ]
    ties = [name for name, _ in model.named_parameters()]
    for name, module in model.named_modules():
        plain = {
            key: value for key, value in vars(module).items() if isinstance(value, (int, float, str, tuple))
        }
        about.append(f"{name} {type(module)} {plain} {[digest(x) for x in module.buffers(recurse=False)]}")
    shapes = tree_map(lambda x: (x.shape, x.dtype) if isinstance(x, Tensor) else x, call)
    key = repr((about, ties, model, options, shapes, keywords))
    if key not in PROGRAMS:
        PROGRAMS[key] = compile_program(model, options, *call, **keywords)
    return PROGRAMS[key]


def data(step: int) -> tuple[Tensor, Tensor]:
    return tuple(x.roll(step, 0) for x in batch(8, VOCAB))  # type: ignore[return-value]


def train(pm: autoptd.ParallelModel, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    """Train from where the model is; return the losses."""
    losses = []
    for _ in range(steps):
        losses.append(float(pm.step(*data(pm.steps))))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def state_of(pm: autoptd.ParallelModel, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """All of the state, in full, by name."""
    found: dict[str, Any] = {f"model.{name}": x for name, x in pm.state_dict().items()}
    state = optimizer.state_dict()
    for name, entries in state["state"].items():
        found |= {f"{name}.{key}": value for key, value in entries.items()}
    for number, group in enumerate(state["param_groups"]):
        found |= {f"group {number}.{key}": value for key, value in group.items()}
    return {**found, "steps": pm.steps, "loss_scale": state.get("loss_scale")}


def assert_used(pm: autoptd.ParallelModel) -> None:
    """What stages compute with is what is stored, in their dtype, on every rank."""
    full = pm.state_dict()
    for rank in pm.run.ranks.here:
        for spec in rank.params.specs:
            if (used := rank.params.local.get(spec.name)) is not None:
                expected = shard_of(spec, full[spec.name], rank.world).to(used.dtype)
                with unguarded():
                    assert torch.equal(used.detach(), expected), spec.name


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Equal to the bit."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, Tensor):
            assert found[name].dtype == value.dtype, name
            assert torch.equal(found[name], value), name
        else:
            assert found[name] == value, name
