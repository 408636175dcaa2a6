"""How far predictions may be off each other: the numbers are those that benchmarks/planner_accuracy.py found."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from autoptd.wings.planner.cluster import COMPARED, find_cluster, uncertainty

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results" / "planner_accuracy.json"


def test_extremes_are_those_of_the_measured_sets() -> None:
    sets = json.loads(RESULTS.read_text())["sets"]
    for one in COMPARED:
        if one.source not in sets:
            continue
        worst = max(-one.lowest, one.highest)
        assert worst == pytest.approx(sets[one.source]["calibrated"]["worst"], abs=2e-3), one.source
        if "points" in sets[one.source]:
            errors = [point["predicted"] / point["measured"] - 1 for point in sets[one.source]["points"]]
            assert (one.lowest, one.highest) == pytest.approx((min(errors), max(errors)), abs=2e-3), (
                one.source
            )


def test_what_was_not_compared_is_not_known() -> None:
    a100 = find_cluster("dgx-a100")
    assert uncertainty(a100, "fp16") == pytest.approx(1.037 / 0.958 - 1)
    assert uncertainty(a100.with_software("deepspeed-zero3-2021"), "fp16", is_zero_3=True) == pytest.approx(
        0.265
    )
    for cluster, precision, is_zero_3 in (
        (a100, "fp32", False),
        (a100, "fp16", True),
        (a100.with_software("nemo-2024"), "bf16", False),
        (find_cluster("dgx-b200"), "bf16", False),
        (find_cluster("dgx2h-v100"), "fp16", False),
    ):
        assert math.isinf(uncertainty(cluster, precision, is_zero_3))
