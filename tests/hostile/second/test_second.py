"""The second generator: a few of its cases in every run, and that its judge is honest.

All of them: `python -m tests.hostile.second --cases 400 --seed 5`.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import Any
from unittest import mock

import pytest
import torch

from autoptd.model.parallel_model import ParallelModel
from tests.hostile.judge import Script, judge
from tests.hostile.second.generate import SIZES, TABLES, Case, cases, draw_case
from tests.hostile.second.kinds_loops import judge_loop
from tests.hostile.second.source import Part, write

MESH = {"t": 2, "p": 1, "d": 1, "num_microbatches": 2}
SOME = {  # of each kind what is known to be right, or to be refused
    "buffers": ("mean of the batch", "equal"),
    "optimizers": ("step: decay of matrices, ndim", "equal"),
    "state": ("fine: a cache of tables", "equal"),
    "labels": ("weights by inverse frequency", "equal"),
    "params": ("layerwise decay of lr", "equal"),
}


@pytest.fixture(autouse=True)
def default_dtype() -> Any:
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


def part_of(kind: str, name: str) -> Part:
    return next(part for part in TABLES[kind] if part.name == name)


@pytest.mark.parametrize("kind", SOME)
def test_one_of_each_kind(kind: str) -> None:
    name, wanted = SOME[kind]
    part = part_of(kind, name)
    play = replace(Script(MESH, steps=2), **{**part.play, "steps": 2})
    found = judge(write([part], SIZES), play)
    assert found.kind == wanted, found


@pytest.mark.parametrize("by_folder", [False, True])
def test_what_state_dicts_leave_out_begins_again(by_folder: bool) -> None:
    """A counter that is not persistent, and that the forward reads: torch's resume loses it, too."""
    source = write([part_of("buffers", "counter, not persistent, read")], SIZES)
    found = judge(source, Script(MESH, steps=3, reload={"d": 2, "num_microbatches": 1}, by_folder=by_folder))
    assert found.kind == "equal", found


def test_the_same_seed_draws_the_same_cases_of_all_kinds() -> None:
    def first(seed: int, only: str = "") -> list[str]:
        return [f"{case}{case.source}" for case in islice(cases(seed, only), 100)]

    assert first(5) == first(5) and first(5) != first(6)
    assert {case.kind for case in islice(cases(5), 100)} == set(TABLES)
    names = [f"{case}{case.source}" for case in islice(cases(5), 100) if case.kind == "names"]
    assert first(5, "names")[: len(names)] == names


def test_all_sources_are_python() -> None:
    for kind in set(TABLES) - {"loops", "ties"}:
        for part in TABLES[kind]:
            compile(write([part], SIZES), part.name, "exec")


def test_what_is_wrong_is_told() -> None:
    right = ParallelModel.step
    source = write([part_of("buffers", "counter")], SIZES)
    with mock.patch.object(ParallelModel, "step", lambda *args: right(*args) * (1 + 1e-8)):
        assert judge(source, Script(MESH, steps=1)).detail == "loss 0.0 differs by 1.0e-08"
    with mock.patch.object(ParallelModel, "step", side_effect=KeyError("x")):
        assert judge(source, Script(MESH, steps=1)).detail == "in step: KeyError: 'x'"


@pytest.mark.thorough
def test_a_false_alarm_and_a_silence_are_told(tmp_path: Any) -> None:
    loops = {loop.name: loop for loop in TABLES["loops"]}
    twice = loops["two steps, then an update"]
    assert judge_loop(twice, {"t": 1}, str(tmp_path)).kind == "equal"
    found = judge_loop(replace(twice, says=()), {"t": 1}, str(tmp_path))
    assert found.kind == "wrong" and "a false alarm" in found.detail
    readme = replace(loops["the loop of the README"], says=("add up",))
    assert "said 0 times" in judge_loop(readme, {"t": 1}, str(tmp_path)).detail


def test_a_case_runs_by_itself() -> None:
    import random

    case = draw_case(0, "precision", part_of("precision", "inv_freq, not persistent"), random.Random(1))
    assert isinstance(case, Case) and case.run().kind == "equal"
