"""The generator of hostile cases: a few of them in every run, and that its judge is honest.

All of them: `python -m tests.hostile --cases 300 --seed 7`.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from unittest import mock

import pytest
import torch
from torch import Tensor

from autoptd.model.parallel_model import ParallelModel
from tests.hostile.generate import cases, run, write
from tests.hostile.judge import Outcome, Script, judge
from tests.hostile.processes import process_cases, run_in_processes
from tests.hostile.recipes import FAMILIES, Recipe

MESH = {"t": 2, "p": 1, "d": 1, "num_microbatches": 2}
HOLDS = {  # of each family what is known to be right, or to be refused
    "numbers": ("(i + 1) * 0.5 in h + layer(h) * ({c})", "equal"),
    "storage": ("tie, read again", "equal"),
    "buffers": ("rotary", "equal"),
    "state": ("training, of the loss", "equal"),
    "probes": ("h.flip(0)", "refused"),
    "aliases": ("h.relu_()", "equal"),
    "ranks": ("clip", "equal"),
}


@pytest.fixture(autouse=True)
def default_dtype() -> object:
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


def judged(name: str, **more: object) -> Outcome:
    found = [recipe for family in FAMILIES.values() for recipe in family() if recipe.name == name]
    load = "variant" if found[0].loads else ""
    script = Script(MESH, optimizer="SGD", meddles=found[0].meddles, load=load, **more)  # type: ignore[arg-type]
    return judge(write(found[0], 4), script)


@pytest.mark.one_in(96)
@pytest.mark.parametrize("family", HOLDS)
def test_one_of_each_family(family: str) -> None:
    name, kind = HOLDS[family]
    assert name in [recipe.name for recipe in FAMILIES[family]()]
    outcome = judged(name, steps=3, evaluate=(1,))
    assert outcome.kind == kind, outcome


def test_three_hundred_cases_are_distinct_and_the_same_again() -> None:
    def first(seed: int) -> list[str]:
        return [f"{case}{case.script}{case.source}" for case in islice(cases(seed), 300)]

    assert first(7) == first(7) and first(7) != first(8)
    assert len(set(first(7))) == 300
    drawn = list(islice(cases(7), 300))
    assert {case.recipe.family for case in drawn} == set(FAMILIES)
    assert len({case.source for case in drawn}) > 250
    assert [case.number for case in drawn] == list(range(300))


@pytest.mark.thorough
def test_all_sources_are_python() -> None:
    for family in FAMILIES.values():
        for recipe in family():
            compile(write(recipe, 4), recipe.name, "exec")


def returns(change: Callable[[Tensor], Tensor], name: str = "step") -> object:
    right = getattr(ParallelModel, name)
    return mock.patch.object(
        ParallelModel, name, lambda self, *args, **kwargs: change(right(self, *args, **kwargs))
    )


@pytest.mark.thorough
def test_what_is_wrong_is_told() -> None:
    with returns(lambda loss: loss * (1 + 1e-8)):  # type: ignore[attr-defined]
        assert judged("tie", steps=2).detail == "loss 0.0 differs by 1.0e-08"
    with returns(lambda loss: loss.float()):  # type: ignore[attr-defined]
        assert "torch.float32" in judged("tie", steps=2).detail
    with returns(lambda loss: loss + 1, "eval_step"):  # type: ignore[attr-defined]
        assert judged("tie", steps=2, evaluate=(1,)).detail.startswith("evaluation 0.0 differs")
    with mock.patch.object(ParallelModel, "load_state_dict", lambda *_: None):
        moved = judged("tie", steps=4, reload={**MESH, "t": 1})
        assert moved.kind == "wrong" and moved.detail.startswith("loss 2.0 differs")


def test_what_is_raw_and_what_says_nothing() -> None:
    with mock.patch.object(ParallelModel, "step", side_effect=KeyError("args_2")):
        assert judged("tie", steps=2) == Outcome("raw", "in step: KeyError: 'args_2'", mock.ANY)
    bad = Recipe("probes", "fails in torch", loss="h.sum() / 0 * F.nothing(h)")
    assert judge(write(bad, 4), Script(MESH)).kind == "void"
    steep = Recipe("probes", "amplifies", end=("h = (h * 1e7).sin()",))
    with returns(lambda loss: loss * (1 + 1e-8)):  # type: ignore[attr-defined]
        assert judge(write(steep, 4), Script(MESH, steps=2)).kind == "void"


def test_ranks_that_differ_must_not_pass() -> None:
    """Where the plain loop has no like of it, training on in silence is wrong."""
    silent = Recipe("ranks", "silence", meddles=("pass", "1 / 0"))
    outcome = judge(write(silent, 4), Script(MESH, steps=1, meddles=silent.meddles))
    assert outcome.kind == "wrong" and "nothing was said" in outcome.detail


@pytest.mark.thorough  # half a minute
@pytest.mark.processes
def test_real_processes_are_judged() -> None:
    case = next(one for one in process_cases() if one.name.startswith("clip"))
    assert run_in_processes(case.source, case.script).kind == "equal"


def test_a_case_of_the_list_runs() -> None:
    case = next(one for one in cases(7, "numbers") if "0.5" in one.recipe.name and one.recipe.loop)
    assert run(case).kind == "equal"
