"""Optimizers of whole matrices: the update of one device, whatever ranks store; state at one home, and in any checkpoint."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import autoptd
from autoptd.compiler import compiler
from autoptd.errors import PlanError
from autoptd.ir.mesh import Mesh
from autoptd.model.parallel_model import ParallelModel
from autoptd.runtime.params.whole import place_homes
from tests.forks import told
from tests.parity.models import batch, gpt
from tests.parity.test_sharing import grouped
from tests.runtime.checkpoint.models import compiled_once, data, tied_gpt
from tests.runtime.checkpoint.test_layouts import conv1d, labelled

MATRICES = ["*attn*.weight", "*mlp*.weight"]
Optimizers = list[torch.optim.Optimizer]
STEPS = 3


class Lamb(torch.optim.Optimizer):
    """Adam with a trust ratio: norms of whole tensors (You et al. 2020)."""

    whole = True

    def __init__(self, params: Any, lr: float = 1e-2, decay: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state["step"] = count = state.get("step", 0) + 1
                first = state.setdefault("exp_avg", torch.zeros_like(p)).lerp_(p.grad, 0.1)
                second = state.setdefault("exp_avg_sq", torch.zeros_like(p)).lerp_(p.grad**2, 0.01)
                update = first / (1 - 0.9**count) / ((second / (1 - 0.99**count)).sqrt() + 1e-3)
                update += group["decay"] * p
                p.sub_(update * (p.norm() / update.norm().clamp(min=1e-9)), alpha=group["lr"])


class Shampoo(torch.optim.Optimizer):
    """Preconditions rows and columns of matrices (Gupta et al. 2018)."""

    whole = True

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(self.preconditioned(p), alpha=group["lr"])

    def preconditioned(self, p: Tensor) -> Tensor:
        update: Tensor = p.grad  # type: ignore[assignment]
        for dim in range(p.dim() if p.dim() == 2 else 0):
            rows = p.grad if dim == 0 else p.grad.T  # type: ignore[union-attr]
            start = 0.1 * torch.eye(len(rows), dtype=p.dtype)
            side = self.state[p].setdefault(f"side_{dim}", start).addmm_(rows, rows.T)
            values, vectors = torch.linalg.eigh(side)
            root = vectors * values**-0.25 @ vectors.T
            update = root @ update if dim == 0 else update @ root
        return update


def mixed(source: Any, names: Iterable[str] = MATRICES) -> Optimizers:
    """Muon for matrices within layers, AdamW for all else."""
    if isinstance(source, ParallelModel):
        rest = [spec.name for spec in source.program.params if not is_matrix(spec.name)]
        muon = source.optimizer(torch.optim.Muon, names, lr=0.02)
        return [muon, source.optimizer(torch.optim.AdamW, rest, lr=0.01)]
    named = dict(source.named_parameters())
    matrices = [x for name, x in named.items() if is_matrix(name)]
    others = [x for name, x in named.items() if not is_matrix(name)]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01)]


def is_matrix(name: str) -> bool:
    return ("attn" in name or "mlp" in name) and name.endswith("weight")


def only(cls: Any, **settings: Any) -> Callable[[Any], Optimizers]:
    def make(source: Any) -> Optimizers:
        if isinstance(source, ParallelModel):
            return [source.optimizer(cls, **settings)]
        return [cls(source.parameters(), **settings)]

    return make


KINDS: dict[str, Callable[[Any], Optimizers]] = {
    "Muon and AdamW": mixed,
    # The gradients of key biases are rounding errors, which an Adafactor without this bound would scale up.
    "Adafactor": only(torch.optim.Adafactor, lr=0.02, eps=(1e-4, 1e-3)),
    "LAMB": only(Lamb),
    "Shampoo": only(Shampoo),
}


def parallel(model: nn.Module, call: Any = None, **keywords: Any) -> ParallelModel:
    settings = {"backend": "local", "example_inputs": data(0) if call is None else call, **keywords}
    with mock.patch.object(compiler, "compile_program", compiled_once):
        return autoptd.parallelize(model, **settings)


def train(model: Any, optimizers: Optimizers, seeds: Iterable[int], call: Any = None) -> None:
    for seed in seeds:
        given = data(seed) if call is None else call
        if isinstance(model, ParallelModel):
            model.step(**given) if isinstance(given, dict) else model.step(*given)
        else:
            output = model(**given) if isinstance(given, dict) else model(*given)
            parts = output.values() if isinstance(output, dict) else output
            next(x for x in parts if isinstance(x, Tensor) and not x.dim()).backward()
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()


def assert_same(pm: ParallelModel, found: Optimizers, model: nn.Module, expected: Optimizers) -> None:
    """Parameters and all of the optimizers' state are those of one device."""
    values = pm.state_dict()
    for name, x in model.named_parameters():
        assert torch.allclose(values[name], x, rtol=0, atol=1e-9), name
    named = {x: name for name, x in model.named_parameters()}
    for one, other in zip(found, expected, strict=True):
        state = one.state_dict()["state"]
        assert state.keys() == {named[x] for x in other.state}
        for x, record in other.state.items():
            assert state[named[x]].keys() == record.keys()
            for key, value in record.items():
                own = state[named[x]][key]
                assert torch.allclose(torch.as_tensor(own), torch.as_tensor(value), rtol=0, atol=1e-9), key


MESHES = [
    ({"t": t, "p": p, "d": d, "zero": zero, "num_microbatches": m})
    for t, p, d, zero, m in product((1, 2), (1, 2), (1, 2), (0, 1), (1, 4))
    if t * p * d > 1 and zero < d
]
# Each pair of a kind and a mesh that differ in what they store.
DEFAULT = {
    "Muon and AdamW": [(2, 2, 2, 1, 4), (2, 1, 1, 0, 1), (1, 2, 1, 0, 4)],
    "Adafactor": [(2, 1, 2, 0, 4), (1, 2, 2, 1, 1)],
    "LAMB": [(2, 2, 2, 0, 1), (2, 1, 2, 1, 4)],
    "Shampoo": [(2, 1, 2, 1, 4), (1, 1, 2, 0, 1)],
}


@pytest.mark.parametrize(
    "kind, mesh",
    [
        pytest.param(
            kind, mesh, marks=() if tuple(mesh.values()) in DEFAULT[kind] else pytest.mark.thorough
        )
        for kind in KINDS
        for mesh in MESHES
    ],
    ids=str,
)
def test_the_update_of_one_device(kind: str, mesh: dict[str, int]) -> None:
    """A fused projection, tied embeddings of 61 rows, which no t divides, and a frozen parameter."""
    model, make = tied_gpt(), KINDS[kind]
    pm = parallel(tied_gpt(), **mesh)
    found, expected = make(pm), make(model)
    train(pm, found, range(STEPS))
    train(model, expected, range(STEPS))
    assert_same(pm, found, model, expected)
    pm.close()
