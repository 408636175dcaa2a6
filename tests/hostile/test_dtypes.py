"""Losses of bf16 models keep the dtype and the value of the model's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoptd

FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda x: x.mean(dtype=torch.float32),
    "mean of dims": lambda x: x.mean(0, keepdim=True, dtype=torch.float32).mean(),
    "mean of features": lambda x: (x * x.square().mean(-1, keepdim=True, dtype=torch.float32).rsqrt()).mean(),
    "sum": lambda x: x.sum(dtype=torch.float32),
    "softmax": lambda x: (x * x.softmax(-1, dtype=torch.float32)).mean(),
    "log_softmax": lambda x: -x.log_softmax(-1, dtype=torch.float32).mean(),
    "cumsum": lambda x: x.cumsum(1, dtype=torch.float32).mean(),
    "norm": lambda x: torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32).mean(),
    "prod": lambda x: x.sigmoid().prod(-1, dtype=torch.float32).mean(),
    "in 16 bits": lambda x: x.mean(),
    "cast": lambda x: x.mean().float(),
}
MESHES: list[dict[str, Any]] = [{"num_microbatches": 4}, {"t": 2, "d": 2}]


class Narrow(nn.Module):
    def __init__(self, form: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.form, self.up, self.down = form, nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.form(self.down(torch.tanh(self.up(x))))


CASES = [(form, mesh) for form in FORMS for mesh in MESHES]


@pytest.mark.parametrize(("form", "mesh"), CASES, ids=[f"{form} {mesh}" for form, mesh in CASES])
def test_a_loss_of_16_bits(form: str, mesh: dict[str, Any]) -> None:
    model = Narrow(FORMS[form]).bfloat16()
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    pm = autoptd.parallelize(model, backend="local", example_inputs=(x,), **mesh)
    found, wanted = pm.step(x), model(x).detach()
    assert found.dtype == wanted.dtype
    # Ranks round their own halves of a sum to bf16; what is not split differs by the rounding of the result's dtype.
    parts = 4 if wanted.dtype == torch.bfloat16 or form == "cast" else 1
    tolerance = parts * 2**-8 if parts > 1 or "t" in mesh else 1e-5
    assert abs(float(found) - float(wanted)) <= tolerance * abs(float(wanted))
    pm.close()


def test_a_mean_does_not_overflow_where_the_models_does_not() -> None:
    """The sum of 4,096 numbers near 40 is out of the range of float16."""
    model = nn.Linear(16, 64).half()
    torch.nn.init.constant_(model.bias, 40.0)
    x = torch.randn(64, 16).half()

    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x).mean()

    pm = autoptd.parallelize(Mean(), num_microbatches=1, d=2, backend="local", example_inputs=(x,))
    assert abs(float(pm.step(x)) - float(model(x).mean())) < 0.1
    pm.close()
