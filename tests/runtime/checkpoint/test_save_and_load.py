"""A checkpoint of any mesh is loaded by any other to the bit, and training goes on as it would have."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.runtime.checkpoint.models import assert_same, assert_used, running, state_of, train

MESHES: list[dict[str, Any]] = [
    {},
    {"t": 2},
    {"t": 4, "d": 2},
    {"p": 2, "d": 2},
    {"t": 2, "p": 2, "d": 2},
    {"p": 2, "v": 1, "t": 4},
    {"d": 4},
    {"d": 2, "zero": 1},
    {"t": 2, "d": 4, "zero": 1},
    {"p": 2, "d": 4, "zero": 1, "dp_shard": 2},
    {"t": 2, "p": 2, "d": 2, "zero": 1},
    {"c": 2, "d": 2, "zero": 1},
    {"d": 2, "order": "pp-tp-dp", "p": 2, "t": 2},
]
# Those that compute from float32 storage are a family of their own, as that is what they save.
MIXED: list[dict[str, Any]] = [
    {"precision": "bf16", "d": 2, "t": 2},
    {"precision": "bf16", "zero": 1, "d": 2, "p": 2},
    {"precision": "fp16", "zero": 1, "d": 4},
    {"precision": "fp16", "t": 2, "p": 2},
    {"precision": "bf16-mixed", "t": 2, "d": 2},
]
# A loss scale is that of the run that goes on, or of none.
SAME_SCALE = [
    (one, other)
    for one, other in product(MIXED, MIXED)
    if one["precision"].startswith("fp16") == other["precision"].startswith("fp16")
]
OPTIMIZERS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9}),
    (torch.optim.Adagrad, {"lr": 1e-2}),
    (torch.optim.NAdam, {"lr": 1e-2}),
    (torch.optim.SGD, {"lr": 1e-2}),
]


def text(mesh: dict[str, Any]) -> str:
    return ",".join(f"{key}={value}" for key, value in mesh.items()) or "one"


def round_trip(tmp_path: Path, source: dict[str, Any], target: dict[str, Any], **keywords: Any) -> None:
    """Save on one mesh, load on another: the same state; and three more steps, the same losses."""
    pm, optimizer = running(**source, **keywords)
    train(pm, optimizer, 2)
    expected = state_of(pm, optimizer)
    pm.save(tmp_path / "saved", optimizer=optimizer)
    # Saving has changed nothing.
    assert_same(state_of(pm, optimizer), expected)
    other, others = running(**target, **keywords)
    train(other, others, 1)
    other.load(tmp_path / "saved", optimizer=others)
    assert_same(state_of(other, others), expected)
    assert_used(other)
    # A loss that is computed in 16 bits has steps of 2**-6 here, of which another mesh may take some.
    bound = 2**-4 if "precision" in source else 1e-12
    for one, two in zip(train(pm, optimizer, 3), train(other, others, 3), strict=True):
        assert abs(one - two) <= bound
    pm.close()
    other.close()


@pytest.mark.one_in(200)
@pytest.mark.parametrize(("source", "target"), list(product(MESHES, MESHES)), ids=text)
def test_any_mesh_to_any_other(tmp_path: Path, source: dict[str, Any], target: dict[str, Any]) -> None:
    at = MESHES.index(source) + MESHES.index(target)
    cls, settings = OPTIMIZERS[at % len(OPTIMIZERS)]
    round_trip(tmp_path, source, target, optimizer=cls, settings=settings)


@pytest.mark.one_in(20)
@pytest.mark.parametrize(("source", "target"), SAME_SCALE, ids=text)
def test_any_precision_to_any_other(tmp_path: Path, source: dict[str, Any], target: dict[str, Any]) -> None:
    round_trip(tmp_path, source, target)
