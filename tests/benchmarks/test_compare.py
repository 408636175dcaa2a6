"""The comparison with neighbours: its file of results is whole and says that ours is right, its pure parts, and toy runs."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from benchmarks import compare
from benchmarks.lib import hf_forms
from benchmarks.lib.hf_forms import FORMS, Case
from benchmarks.lib.processes import spawn
from benchmarks.lib.report import RESULTS

TOY = {"h": 32, "layers": 2, "vocabulary": 64, "rows": 4, "tokens": 8}
ROUNDING = 1e-6  # of what transformers computes in float32 in any model


def test_the_results_have_all_forms_and_ours_are_right() -> None:
    rows = json.loads((RESULTS / "compare.json").read_text())["rows"]
    every = {
        (name, str(case), who)
        for name, cases in compare.MODELS.items()
        for case in cases
        for who in FORMS[str(case)]
    }
    assert {(row["model"], row["mesh"], row["who"]) for row in rows} == every
    for row in rows:
        if row["who"].startswith("AutoPTD"):
            assert row["weight error"] < ROUNDING and row["loss error"] < 10 * ROUNDING
        assert ("reason" in row) != ("ms" in row)


def test_lines_are_those_beyond_the_loop_for_one_device() -> None:
    model = compare.make("Llama", TOY, torch.float32)
    lines = {who: hf_forms.lines_of(form, model, Case(d=2)) for who, form in FORMS["d=2"].items()}
    assert lines["torch DDP"] == 1 and lines["torch FSDP2"] == 3
    assert lines["AutoPTD"] == 1  # parallelize and the arguments of the mesh, less a line for backward
    by_hand = [hf_forms.lines_of(hf_forms.pipeline_by_hand, model, Case(t=t, p=2)) for t in (1, 2)]
    assert lines["AutoPTD"] < by_hand[0] < by_hand[1]


def test_a_ratio_is_theirs_to_ours_and_a_reason_stays() -> None:
    same: dict[str, Any] = {"lines": 1, "loss error": 0.0, "weight error": 0.0, "peak bytes": 8}
    drawn = {
        "AutoPTD": same | {"wall": [1.0] * 6, "cpu": [2.0] * 6},
        "slow": same | {"wall": [3.0] * 6, "cpu": [2.0] * 6},
        "refused": {"reason": "ValueError: no"},
    }
    ours, slow, refused = compare.rows_of("Llama", Case(d=2), drawn)
    assert "wall" not in ours and slow["wall"]["median"] == 3.0 and slow["cpu"]["median"] == 1.0
    assert refused == {"model": "Llama", "mesh": "d=2", "who": "refused", "reason": "ValueError: no"}
    assert compare.reason_of(ValueError("no\nat all")) == "ValueError: no"
    assert compare.reason_of(KeyError()) == "KeyError"


@pytest.mark.thorough
@pytest.mark.parametrize("name", compare.MODELS)
def test_a_toy_pipeline_shows_which_ties_are_lost(name: str) -> None:
    found = spawn(compare.measure, 2, name, TOY, Case(p=2, m=2), 0.0)
    assert found["AutoPTD"]["weight error"] < ROUNDING
    assert found["torch stages by hand"]["weight error"] < ROUNDING
    assert (found["torch pipeline()"]["weight error"] > 100 * ROUNDING) == name.endswith("tied")
    assert "reason" in found["transformers, pp_size"]
