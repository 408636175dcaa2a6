"""Layers by torch's compiler: which functions are compiled, how often, and that results stay."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import autoptd
from autoptd.runtime.step import stage as stages
from tests.parity.models import batch, gpt


def compiled(monkeypatch: pytest.MonkeyPatch, layers: int, **mesh: int) -> list[str]:
    """Names of the functions that go to the compiler, of all stages."""
    seen: list[str] = []

    def record(function: Any, **options: Any) -> Any:
        seen.append(function.__name__)
        return function

    program = autoptd.compile(gpt(layers), example_inputs=batch(), fuse="inductor", **mesh)
    monkeypatch.setattr(torch, "compile", record)
    sources = dict(program.sources)
    shared = sources.pop("layers.py", "")
    layers = stages.load_layers(shared, "<layers.py of a test>", compiled=True) if shared else {}
    for name, source in sources.items():
        stages.load_stage(source, f"<{name} of a test>", layers, compiled=True)
    return seen


def test_one_compile_per_distinct_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compiled(monkeypatch, 4) == compiled(monkeypatch, 6) == ["layer"]
    assert compiled(monkeypatch, 6, p=2, t=2) == ["layer"]
    assert compiled(monkeypatch, 1) == ["forward"]


@pytest.mark.inductor
def test_parity(capsys: pytest.CaptureFixture[str]) -> None:
    """On ranks as threads; minutes."""
    autoptd.verify(gpt(4), t=2, num_microbatches=2, example_inputs=batch(), fuse="inductor", steps=2)
    assert "the first step, including the compilation of its layers, took" in capsys.readouterr().err
