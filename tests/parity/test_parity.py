"""Whole models: loss, every gradient and every updated parameter equal those of the model on one device, in float64.

`verify` runs AdamW steps on both and raises when anything differs by more than DESIGN.md 1 allows.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autoptd
from autoptd.ir.actions import SCHEDULES
from tests.parity.models import VOCAB, batch, gpt, separate, skipping, uneven

MESHES = [(1, 1, 1, 1), (2, 1, 1, 1), (4, 1, 1, 1), (1, 2, 1, 1), (1, 4, 1, 1), (1, 2, 1, 2), (1, 1, 2, 1)]
MESHES += [(2, 2, 1, 1), (2, 2, 2, 1), (2, 2, 2, 2), (4, 2, 1, 2)]


def schedules(t: int, p: int, d: int, v: int) -> list[str]:
    """The schedules that apply to a mesh; the newer ones on the full mesh only, as `tests/grid.py` covers the rest."""
    if p == 1:
        return ["1f1b"]
    is_full = t == p == d == 2
    asked = SCHEDULES if is_full else ("gpipe", "1f1b", "interleaved")
    return [name for name in asked if SCHEDULES[name] in (0, v)]


CASES = [(*mesh, schedule) for mesh in MESHES for schedule in schedules(*mesh)]


@pytest.mark.one_in(96)
@pytest.mark.parametrize(("t", "p", "d", "v", "schedule"), CASES)
def test_gpt_with_tied_embeddings(t: int, p: int, d: int, v: int, schedule: str) -> None:
    report = autoptd.verify(gpt(), t=t, p=p, d=d, v=v, schedule=schedule, example_inputs=batch(), steps=3)
    assert len(report.differences) > 5 * len(list(gpt().parameters()))


@pytest.mark.thorough  # by default in the covering array
@pytest.mark.parametrize("order", ["pp-dp-tp", "dp-pp-tp", "tp-pp-dp"])
def test_any_order_of_ranks(order: str, tmp_path: Path) -> None:
    request: dict[str, Any] = {
        "t": 2,
        "p": 2,
        "d": 2,
        "order": order,
        "p2p": "scatter_gather",
        "example_inputs": batch(),
    }
    autoptd.verify(gpt(2), **request, steps=2)
    program = autoptd.compile(gpt(2), **request)
    program.save(tmp_path)
    assert autoptd.Program.load(tmp_path).mesh == program.mesh
    again = autoptd.compile(gpt(2), plan=tmp_path, example_inputs=batch())
    assert (again.plan["mesh"]["order"], again.sources) == (order, program.sources)


@pytest.mark.parametrize(
    ("reduction", "mesh"),
    list(itertools.product(["mean", "sum"], [(2, 2, 2, 1), (1, 2, 1, 1), (2, 1, 1, 1), (1, 2, 2, 2)])),
)
def test_separate_projections_and_ignored_labels(reduction: str, mesh: tuple[int, int, int, int]) -> None:
    t, p, d, v = mesh
    ids, targets = batch()
    autoptd.verify(
        separate(2 * v, reduction=reduction),
        t=t,
        p=p,
        d=d,
        v=v,
        example_inputs={"ids": ids, "labels": uneven(targets)},
        steps=2,
    )


@pytest.mark.one_in(96)
@pytest.mark.parametrize(("t", "p", "v", "layers"), [(2, 2, 2, 5), (1, 4, 1, 7), (1, 2, 2, 7), (1, 2, 1, 3)])
def test_any_number_of_layers(t: int, p: int, v: int, layers: int) -> None:
    autoptd.verify(gpt(layers), t=t, p=p, v=v, example_inputs=batch(), steps=2)


@pytest.mark.one_in(96)
@pytest.mark.parametrize(
    "schedule", [{"schedule": "zb_h1"}, {"schedule": "zb_2p"}, {"schedule": "zbv", "v": 2}], ids=str
)
def test_zero_bubble_defers_the_gemms_of_weights_only(schedule: dict[str, Any]) -> None:
    """A tied embedding, norms and biases stay with B; sums in float32 (here float64) and an all-reduce beside the GEMM."""
    hooks = {"accumulate_allreduce_grads_in_fp32": True, "async_tensor_model_parallel_allreduce": True}
    mesh: dict[str, Any] = {"t": 2, "p": 2, "d": 2, **schedule, **hooks, "example_inputs": batch()}
    model = gpt(2 * schedule.get("v", 1))
    program = autoptd.compile(model, **mesh)
    assert "wgrad=self.deferred" in program.sources["stage_0.py"]
    assert " W0.0 " in program.schedule
    autoptd.verify(model, **mesh, steps=2)


@pytest.mark.parametrize(
    "mesh",
    [
        {"p": 2},
        {"p": 3, "d": 2},
        {"t": 2, "p": 2, "v": 3},
        {"p": 3, "v": 2, "schedule": "zbv"},
        {"p": 3, "schedule": "zb_h1"},
    ],
)
def test_skips_and_inputs_of_later_stages(mesh: dict[str, int]) -> None:
    ids, targets = batch(12)
    autoptd.verify(skipping(), **mesh, example_inputs=(ids, targets), steps=2)


def test_loss_function_beside_the_model() -> None:
    ids, targets = batch()
    model = nn.Sequential(nn.Embedding(VOCAB, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, VOCAB))

    def loss_fn(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), label_smoothing=0.1)

    call: dict[str, Any] = {"input": ids, "targets": targets}
    autoptd.verify(model, t=2, p=2, d=2, loss_fn=loss_fn, example_inputs=call, steps=2)


def test_one_row_per_microbatch() -> None:
    autoptd.verify(gpt(2), d=2, num_microbatches=4, example_inputs=batch(8))


def test_vocabulary_parallel_loss_is_chosen_and_right() -> None:
    model = gpt(2, width=16, vocab=VOCAB)
    program = autoptd.compile(model, t=2, example_inputs=batch())
    assert "rt.vocab_parallel_cross_entropy" in program.sources["stage_0.py"]
    ids, targets = batch()
    autoptd.verify(model, t=2, d=2, example_inputs=(ids, uneven(targets)), steps=2)


@pytest.mark.parametrize("width", [32, 64])
def test_float32_within_1e_5(width: int) -> None:
    """The model's own precision: one step of the partitioned model against the model."""
    model, (ids, targets) = gpt(width=width), batch()
    loss = model(ids, targets)[1]
    loss.backward()
    pm = autoptd.parallelize(model, t=2, p=2, d=2, v=2, backend="local", example_inputs=(ids, targets))
    try:
        assert torch.allclose(pm.step(ids, targets), loss.detach(), rtol=1e-5, atol=0)
        largest = max(float(p.grad.abs().max()) for p in model.parameters() if p.grad is not None)
        for name, gradient in pm.gradients().items():
            wanted = model.get_parameter(name).grad
            assert wanted is not None
            scale = max(float(wanted.abs().max()), 1e-3 * largest)
            assert float((gradient - wanted).abs().max()) <= 1e-5 * scale, name
    finally:
        pm.close()
