"""`autoptd diff`: everything that differs is told, nothing where nothing does, and how the command ends."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import autoptd
from autoptd.__main__ import main
from autoptd.program.program import Program
from autoptd.wings.reports.summary import summarize
from autoptd.wings.words import bytes_text, seconds_text
from tests.parity.models import batch, gpt


@cache
def program(layers: int = 2, sequence_parallel: bool = False, **request: Any) -> Program:
    return autoptd.compile(
        gpt(layers), example_inputs=batch(), sequence_parallel=sequence_parallel, **request
    )


def test_equal_programs_do_not_differ(tmp_path: Path) -> None:
    program(t=2).save(tmp_path)
    assert autoptd.diff(tmp_path, program(t=2)) == ""
    assert autoptd.diff(tmp_path / "plan.json", program(t=2).plan) == ""


def test_another_split_is_told_by_layer_and_by_collective() -> None:
    lines = autoptd.diff(program(t=2), program(t=2, sequence_parallel=True)).splitlines()
    assert "  sequence_parallel: false -> true" in lines
    assert "  transformer.h.*.ln_2.weight: I -> R" in lines
    was, now = "2 x all-reduce forward", "2 x reduce-scatter forward and all-gather backward"
    assert (
        f"  transformer.h.*.mlp.c_proj: {was} over tp, 2 KiB on 2 ranks -> {now} over tp, 2 KiB on 2 ranks"
        in lines
    )
    assert "communicated in every microbatch" in lines and "communicated in every step" in lines
    assert not any("c_fc.weight" in line for line in lines)  # split alike by both


def test_mesh_cut_and_schedule() -> None:
    plans = program(layers=4, p=2), program(layers=4, p=2, v=2), program(layers=4, p=4, schedule="gpipe")
    told = autoptd.diff(plans[0].plan, plans[1].plan).splitlines()
    assert "  v: 1 -> 2" in told and "  schedule: 1f1b -> interleaved" in told
    assert any(
        line.startswith("  after: transformer.h.") and " -> transformer.h.0, " in line for line in told
    )
    assert "  p: 2 -> 4" in autoptd.diff(plans[0], plans[2]).splitlines()


def test_one_layer_that_differs_is_named() -> None:
    whole = autoptd.compile(
        gpt(2),
        t=2,
        example_inputs=batch(),
        plan={"shard": [{"pattern": "transformer.h.1.mlp.c_fc.weight", "dim": None}]},
    )
    told = autoptd.diff(program(t=2), whole).splitlines()
    assert told[:2] == ["parameters over tp", "  transformer.h.1.mlp.c_fc.weight: S(tp, dim 0: [128]) -> R"]
    assert "transformer.h.1.mlp.c_fc.weight: nothing -> whole" in autoptd.diff(program(t=2).plan, whole.plan)


def test_costs_stand_side_by_side(tmp_path: Path) -> None:
    a, b = program(layers=4, p=2), program(layers=4, p=2, t=2)
    a.save(tmp_path)  # costs are in program.json
    lines = autoptd.diff(tmp_path, b).partition("costs, by the cost model\n")[2].splitlines()
    one, two = summarize(a), summarize(b)
    assert lines[0].split() == ["A", "B"] and len(lines[0]) < 80
    assert any(line.split() == ["ranks", "2", "4"] for line in lines)
    told = "\n".join(lines)
    for costs in (one, two):
        assert seconds_text(costs.step_seconds) in told
        assert bytes_text(max(rank.total_bytes for rank in costs.ranks)) in told
    (sent,) = [line for line in lines if "sent over tp" in line]
    assert "nothing" in sent and "bubble" not in autoptd.diff(a.plan, b.plan)


def test_what_no_group_tells_is_named() -> None:
    """Another seed is an option; another model has other parameters and other files."""
    assert autoptd.diff(program(t=2).plan, program(t=2, seed=1).plan) == "options\n  seed: 0 -> 1\n"
    other = autoptd.diff(program(t=2), autoptd.compile(gpt(2, width=64), t=2, example_inputs=batch()))
    assert "  transformer.ln_f.weight: [32] float32 -> [64] float32" in other.splitlines()
    assert "stage_0.py" in other.partition("also differ\n")[2]


def test_how_the_command_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b, bad = (tmp_path / name for name in ("a.json", "b.json", "bad.json"))
    a.write_text(json.dumps({"mesh": {"t": 2}}))
    b.write_text(json.dumps({"mesh": {"t": 4}}))
    bad.write_text("{")
    assert main(["diff", str(a), str(a)]) == 0 and capsys.readouterr().out == ""
    assert main(["diff", str(a), str(b)]) == 1 and capsys.readouterr().out == "mesh\n  t: 2 -> 4\n"
    for wrong in (bad, tmp_path / "none"):
        assert main(["diff", str(a), str(wrong)]) == 2
        captured = capsys.readouterr()
        assert str(wrong) in captured.err and not captured.out
    (tmp_path / "program.json").write_text("{}")
    assert main(["diff", str(tmp_path), str(a)]) == 2
