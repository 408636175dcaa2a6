"""Costs as program.json has them."""

from __future__ import annotations

import json
from pathlib import Path

from autoptd.program.costs import Costs, Cut, read_costs
from autoptd.program.program import Program
from tests.wings.viz.programs import full

KEYS = "flops_per_stage backward_flops_per_stage total_flops total_backward_flops redundant_gemm_flops"
KEYS += " moved_bytes_per_stage kernels_per_stage"
KEYS += " again_flops_per_stage again_moved_bytes_per_stage again_kernels_per_stage"
ROW = ["stage", "module", "operator", "times", "total", "forward", "backward", "redundant"]
CUT = [
    "after",
    "why",
    "flops",
    "seconds",
    "saved_bytes",
    "rank_seconds",
    "rank_bytes",
    "makespan",
    "again_seconds",
    "link_seconds",
    "peak_bytes",
]


def test_the_keys_of_program_json(tmp_path: Path) -> None:
    program = full()
    program.save(tmp_path)
    record = json.loads((tmp_path / "program.json").read_text())["costs"]
    assert list(record) == [*KEYS.split(), "gemms", "products", "cut"]
    assert list(record["gemms"][0]) == ROW and list(record["cut"]) == CUT
    assert list(record["products"][0]) == ["stage", "sizes", "kind", "times", "forward", "backward"]
    assert read_costs(record) == program.costs == Program.load(tmp_path).costs


def test_what_an_older_file_does_not_say_is_empty() -> None:
    assert read_costs({}) == Costs() and not Costs().cut.seconds
    assert read_costs({"total_flops": 8, "cut": {"after": ["h.0"]}}) == Costs(
        total_flops=8, cut=Cut(("h.0",))
    )
