"""Parity with hooks on the backward of linear layers, each alone and all together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoptd
from tests.parity.models import LENGTH, VOCAB, batch, gpt, separate
from tests.passes.test_hook_gemms import conv

OVERLAP: dict[str, Any] = {"async_tensor_model_parallel_allreduce": True}
MAIN: dict[str, Any] = {"accumulate_allreduce_grads_in_fp32": True}
BEHIND: dict[str, Any] = {"delay_wgrad_compute": "after_b"}
LAST: dict[str, Any] = {"delay_wgrad_compute": "before_reduce"}
HOOKS = {
    "overlap": OVERLAP,
    "main": MAIN,
    "W behind B": BEHIND,
    "W last": LAST,
    "all, W behind B": {**OVERLAP, **MAIN, **BEHIND},
    "all, W last": {**OVERLAP, **MAIN, **LAST},
}


def frozen() -> nn.Module:
    """Frozen: the embedding, so that the first layers' input needs no gradient, and a weight in the middle without its bias."""
    model = separate(2)
    model.embed.weight.requires_grad_(False)
    model.positions.requires_grad_(False)
    for parameter in model.layers[0].norm.parameters():
        parameter.requires_grad_(False)
    model.layers[1].down.weight.requires_grad_(False)
    return model


class Folded(nn.Module):
    """Linear layers on [rows * length, width], on a transposed input, and twice with one weight; a frozen embedding."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.mix, self.shared, self.head = (
            nn.Linear(LENGTH, LENGTH),
            nn.Linear(width, width, bias=False),
            nn.Linear(width, VOCAB),
        )
        self.embed.weight.requires_grad_(False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.mix(x.transpose(1, 2)).transpose(1, 2).tanh()
        x = x.reshape(-1, x.shape[-1])
        x = x + self.shared(self.shared(x).tanh())
        return F.cross_entropy(self.head(x), labels.flatten())


def folded() -> nn.Module:
    torch.manual_seed(0)
    return Folded()


MODELS: dict[str, Callable[[], nn.Module]] = {"frozen": frozen, "folded": folded, "transposed": conv}


@pytest.mark.one_in(96)
@pytest.mark.parametrize("mesh", [{"t": 2, "d": 2}, {"p": 2, "num_microbatches": 2}], ids=str)
@pytest.mark.parametrize("hooks", ["all, W behind B", "overlap", "all, W last"])
@pytest.mark.parametrize("name", MODELS)
def test_other_layers(name: str, hooks: str, mesh: dict[str, Any]) -> None:
    autoptd.verify(MODELS[name](), **mesh, **HOOKS[hooks], example_inputs=batch(), steps=2)


# float32 sums


def gradient_error(hooks: dict[str, Any]) -> float:
    """Of a bf16 model over 128 microbatches, against float64 of the same weights: relative, in the 2-norm."""
    model, (ids, targets) = gpt(1).bfloat16(), batch(128)
    truth = gpt(1).bfloat16().double()
    truth(ids, targets)[1].backward()
    pm = autoptd.parallelize(
        model, num_microbatches=128, backend="local", example_inputs=(ids, targets), **hooks
    )
    try:
        pm.step(ids, targets)
        found = pm.gradients()
        wanted = {name: x.grad for name, x in truth.named_parameters() if x.grad is not None}
        squares = [(found[name].double() - x).square().sum() for name, x in wanted.items()]
        if hooks:
            check_both_gradients(pm, found)
    finally:
        pm.close()
    return float(sum(squares).sqrt() / sum(x.square().sum() for x in wanted.values()).sqrt())  # type: ignore[union-attr]


def check_both_gradients(pm: autoptd.ParallelModel, found: dict[str, Tensor]) -> None:
    """`.grad` is the rounded copy of `.main_grad`, also after clipping; both are gone with `zero_grad`."""
    optimizer = pm.optimizer(torch.optim.SGD, lr=0.1)
    for factor in (1.0, 0.5):
        for name, parameter in pm.named_parameters():
            assert parameter.main_grad.dtype == found[name].dtype == torch.float32
            assert parameter.grad is not None and parameter.grad.dtype == torch.bfloat16
            assert torch.equal(parameter.grad, parameter.main_grad.bfloat16())
            torch.testing.assert_close(parameter.main_grad, factor * found[name], rtol=1e-4, atol=0)
        norm = pm.clip_grad_norm_(1e9)
        if factor == 1.0:
            torch.testing.assert_close(pm.clip_grad_norm_(float(norm) / 2), norm)
    optimizer.step()
    optimizer.zero_grad()
    assert pm.gradients() == {}


def test_sums_in_float32_are_more_exact_than_in_bf16() -> None:
    plain, main = gradient_error({}), gradient_error(MAIN)
    assert main < plain / 3
    assert gradient_error({**MAIN, **LAST}) < plain / 3


def test_a_gradient_that_the_user_changed_counts() -> None:
    ids, targets = batch()
    pm = autoptd.parallelize(gpt(1).bfloat16(), backend="local", example_inputs=(ids, targets), **MAIN)
    try:
        pm.step(ids, targets)
        once = pm.gradients()
        pm.step(ids, targets)
        for name, gradient in pm.gradients().items():  # they add up until zero_grad, in float32
            torch.testing.assert_close(gradient, 2 * once[name], rtol=1e-5, atol=1e-8)
        for _, parameter in pm.named_parameters():
            parameter.grad.fill_(1.0)
        assert all(bool((gradient == 1).all()) for gradient in pm.gradients().values())
        pm.step(ids, targets)
        for name, gradient in pm.gradients().items():
            torch.testing.assert_close(gradient, 1 + once[name])
    finally:
        pm.close()
