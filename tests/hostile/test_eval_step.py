"""Evaluation keeps the cut, the shards and the layout of training, whatever eval mode takes out of the model."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoptd
from autoptd.errors import PlanError
from autoptd.model.parallel_model import ParallelModel
from tests.parity.models import VOCAB, batch, dropping_gpt
from tests.parity.test_dropout import Styles, parameters_dropped, written_out

MESHES = [
    (2, 1, 1, 1, True),
    (1, 2, 1, 2, False),
    (2, 2, 1, 2, False),
    (2, 2, 2, 1, True),
    (4, 2, 1, 2, True),
]


def parallel(model: nn.Module, rows: int = 8, **keywords: Any) -> ParallelModel:
    return autoptd.parallelize(model, backend="local", timeout=30, example_inputs=batch(rows), **keywords)


def expected(model: nn.Module, rows: int = 8) -> float:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    with torch.no_grad():
        found = model(*batch(rows))
    for module, mode in modes:
        module.training = mode
    return float(found if isinstance(found, Tensor) else found[1])


@pytest.mark.one_in(48)
@pytest.mark.parametrize(("layers", "mesh"), list(itertools.product([2, 4], MESHES)))
def test_gpt_with_dropout(layers: int, mesh: tuple[int, int, int, int, bool]) -> None:
    t, p, d, v, sp = mesh
    model = dropping_gpt(layers).double()
    pm = parallel(model, t=t, p=p, d=d, v=v, sequence_parallel=sp)
    assert pm.eval_step(*batch()).item() == pytest.approx(expected(model), rel=1e-12)
    drawn = pm.step(*batch()).item()
    assert drawn != pytest.approx(expected(model), rel=1e-6)  # training draws its masks
    assert pm.eval_step(*batch()).item() == pytest.approx(expected(model), rel=1e-12)
    pm.close()


@pytest.mark.parametrize("mesh", [(1, 3), (1, 4), (2, 2)])
def test_dropouts_alone_are_no_reason_to_compile_again(mesh: tuple[int, int]) -> None:
    torch.manual_seed(0)
    model = Styles(written_out).double()
    pm = parallel(model, t=mesh[0], p=mesh[1])
    assert pm.eval_step(*batch()).item() == pytest.approx(expected(model), rel=1e-12)
    assert pm.sizes.evaluating == [pm.program]
    pm.close()


@pytest.mark.thorough
def test_with_the_plan_pinned() -> None:
    model = dropping_gpt(4).double()
    program = autoptd.compile(model, t=2, p=2, v=2, example_inputs=batch())
    pm = parallel(model, plan=program.plan)
    assert pm.eval_step(*batch()).item() == pytest.approx(expected(model), rel=1e-12)
    pm.close()


@pytest.mark.parametrize("style", [written_out, parameters_dropped])
def test_another_batch_size(style: Any) -> None:
    torch.manual_seed(0)
    model = Styles(style).double()
    pm = parallel(model, t=2, p=2)
    assert pm.eval_step(*batch(12)).item() == pytest.approx(expected(model, 12), rel=1e-12)
    pm.step(*batch())
    pm.close()


class Modes(nn.Module):
    """Eval mode leaves a layer of training out, and scales: it computes something else."""

    def __init__(self, head_in_eval: bool = False) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(VOCAB, 16), nn.ModuleList(nn.Linear(16, 16) for _ in range(6))
        self.head, self.drop, self.head_in_eval = nn.Linear(16, VOCAB), nn.Dropout(0.3), head_in_eval
        self.other = nn.Linear(VOCAB, VOCAB)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for i, layer in enumerate(self.layers):
            x = x + self.drop(layer(x).tanh()) if self.training or i != 2 else 0.9 * x
        logits = self.head(x)
        logits = self.other(logits) if self.head_in_eval and not self.training else logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("mesh", [(1, 2, 2), (2, 2, 1)])
def test_a_model_that_computes_something_else(mesh: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    model = Modes().double()
    pm = parallel(model, t=mesh[0], p=mesh[1], v=mesh[2])
    assert pm.eval_step(*batch()).item() == pytest.approx(expected(model), rel=1e-12)
    (evaluated,) = pm.sizes.evaluating
    assert evaluated is not pm.program and evaluated.params == pm.program.params
    pm.close()


def test_a_parameter_that_training_keeps_elsewhere() -> None:
    torch.manual_seed(0)
    pm = parallel(Modes(head_in_eval=True).double(), p=2)
    with pytest.raises(PlanError, match=r"eval_step: other\.weight.*stage 1, where training does not"):
        pm.eval_step(*batch())
    pm.close()


def test_dropout_that_is_drawn_in_eval_mode_too() -> None:
    class Always(Modes):
        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            logits = self.other(self.head(F.dropout(self.embed(ids), 0.1)))
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    pm = parallel(Always().double(), p=2)
    with pytest.raises(PlanError, match=r"dropout of 0.1 is drawn in eval mode as well"):
        pm.eval_step(*batch())
    pm.close()


class AsksForGradients(nn.Module):
    """What evaluation computes depends on `no_grad` around it, not on the mode."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) * (1.0 + torch.is_grad_enabled())
        return self.b(F.gelu(h)).square().mean()


@pytest.mark.parametrize("mesh", [{}, {"d": 2}, {"t": 2}, {"p": 2}], ids=str)
def test_a_model_that_asks_whether_gradients_are_on(mesh: dict[str, int]) -> None:
    torch.manual_seed(0)
    model, x = AsksForGradients().double(), torch.randn(4, 8).double()
    pm = autoptd.parallelize(model, **mesh, backend="local", example_inputs=(x,))
    assert float(pm.step(x)) == pytest.approx(model(x).item(), rel=1e-12)
    with torch.no_grad():
        assert float(pm.eval_step(x)) == pytest.approx(model(x).item(), rel=1e-12)
    assert float(pm.eval_step(x)) != pytest.approx(model(x).item(), rel=1e-3)
    assert torch.is_grad_enabled()
    pm.close()
