"""The rows of `make gpu` with adapters, at toy size: what they count, and what they tell."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import autoptd
from benchmarks.gpu import adapters
from benchmarks.gpu.device import Device
from benchmarks.gpu.models import LLAMA_8B, QWEN_7B, Shape, batch, build, toy
from benchmarks.gpu.rows import Setting


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    return Setting(Device(), is_toy=True, folder=tmp_path)


@pytest.mark.one_in(9)
@pytest.mark.parametrize("shape", [LLAMA_8B, QWEN_7B])
def test_model_flops_with_adapters_are_those_of_the_program(shape: Shape) -> None:
    """Frozen weights have no gradient; of the first layer nobody asks for that of its input."""
    small = toy(shape)
    model = adapters.with_lora(build(small, "cpu", torch.float32))
    adapted = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert adapted == adapters.adapter_parameters(small)
    _, kwargs = batch(small, "cpu")
    costs = autoptd.compile(model, example_inputs=kwargs, num_microbatches=1).costs
    counted = sum(costs.flops_per_stage) + sum(costs.backward_flops_per_stage)
    # Attention's kernel: two products forward and five backward, each in full.
    scores = small.layers * (14 - 6) * small.tokens * small.s * small.h
    first = (
        2
        * small.tokens
        * (small.h * (small.h + 2 * small.h * small.kv // small.heads) + 3 * adapters.R * small.h)
    )
    assert adapters.lora_flops(small, small.tokens) == counted - scores + first


@pytest.mark.thorough
@pytest.mark.parametrize("shape", [LLAMA_8B, pytest.param(QWEN_7B, marks=pytest.mark.thorough)])
def test_rows_with_adapters_begin_with_ours(shape: Shape, setting: Setting) -> None:
    found = next(adapters.trained(shape, setting))
    (ours,) = found["forms"]
    assert ours["form"] == adapters.FUSED and ours["tokens/s"] > 0 and "on one H100" in found["published"]
    assert 0.9 < ours["predicted over measured"] < 1.1


@pytest.mark.thorough
def test_rows_with_adapters_have_all_forms(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that does not fit says so, and the others are there."""
    made = adapters.eager

    def small(*args: Any) -> Any:
        if args[3] is None:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return made(*args)

    monkeypatch.setattr(adapters, "eager", small)
    *_, found = adapters.trained(LLAMA_8B, setting)
    forms = {one["form"]: one for one in found["forms"]}
    assert list(forms) == [adapters.FUSED, adapters.EAGER, adapters.COMPILED, adapters.PLAIN]
    assert [name for name, one in forms.items() if one.get("why") == "out of memory"] == [adapters.EAGER]
