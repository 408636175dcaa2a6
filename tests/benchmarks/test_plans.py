"""Real models at real sizes have Megatron's plans, with and without sequence parallelism; and the file of results says so."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks import plans

pytest.importorskip("transformers")

QUICK = {("llama-8b", 2048), ("neox-20b", 2048)}
CASES = [
    pytest.param(name, tokens, choice, marks=[] if (name, tokens) in QUICK else [pytest.mark.thorough])
    for tokens in plans.TOKENS[:2]
    for name in plans.MODELS
    for choice in (False, True)
]


def check(row: dict[str, Any]) -> None:
    """All matrices are split, no layer differs from its neighbour, and each communicates what Megatron's does."""
    assert row["parameters over 1/t"] <= 1.02
    assert row["layers are alike"]
    assert row["layer"] == row["megatron"]


@pytest.mark.one_in(9)
@pytest.mark.parametrize(("name", "tokens", "choice"), CASES)
def test_a_real_model_has_megatrons_plan(name: str, tokens: int, choice: bool) -> None:
    check(plans.row(name, tokens, choice))


def test_layers_of_a_real_model_are_written_once() -> None:
    """Megatron's f and g, and in front of the layers what brings the embedding to them."""
    program = plans.plan("llama-8b", 2048, False)
    made = {one.conversion for one in program.collectives if one.site.startswith("model.layers.")}
    assert made - {"i_to_p"} == {"i_to_r", "p_to_i"}
    assert "s_to_i(embed_tokens" in program.sources["stage_0.py"]
    assert f"for i in range({plans.LAYERS}):  # model.layers.0 to" in program.sources["stage_0.py"]


def test_the_results_are_megatrons_plans() -> None:
    rows = json.loads((plans.RESULTS / "plans.json").read_text())["rows"]
    every = {
        (name, tokens, choice) for name in plans.MODELS for tokens in plans.TOKENS for choice in plans.CHOICES
    }
    assert {(one["model"], one["tokens"], one["sequence parallel"]) for one in rows} == every
    for one in rows:
        if one["sequence parallel"] != "auto":
            check(one)
