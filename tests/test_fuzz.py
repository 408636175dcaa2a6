"""Random decoders: a few dozen in every run of the tests, and proof that the search finds, shrinks and prints what is wrong."""

from __future__ import annotations

import importlib
import random
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from autoptd.errors import InternalError, PlanError
from autoptd.model.parallel_model import ParallelModel
from tests.fuzz.features import CHOICES, Case
from tests.fuzz.plant import FAULTS, planted
from tests.fuzz.script import script
from tests.fuzz.search import SIMPLEST, Tally, refusal_of, run_case, run_round, search

COUNT = 24


def covering(count: int) -> list[Case]:
    """Cases in which every choice of every feature occurs, combined at random, the same in every run."""
    generator = random.Random(0)
    columns: dict[str, list[Any]] = {}
    for name, choices in CHOICES.items():
        repeated = choices * -(-count // len(choices))
        columns[name] = generator.sample(repeated[:count], count)
    return [Case({name: column[i] for name, column in columns.items()}) for i in range(count)]


CASES = covering(COUNT)
REFUSED: dict[int, str] = {  # number of a case -> words of its refusal; all others pass
    **dict.fromkeys((2, 11, 13, 14, 23), "TooFull"),
    22: "cannot be converted to type cN::Half without overflow",
}
verify_module = importlib.import_module("autoptd.verify.verify")


@pytest.fixture
def all_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `python -m tests.fuzz` runs them: verify saves, loads and evaluates too."""
    monkeypatch.setattr(verify_module, "CHECKS", ("reload", "evaluation"))


NAMES = [f"{number}: " + "-".join(map(str, case["mesh"])) for number, case in enumerate(CASES)]


@pytest.mark.one_in(64)
@pytest.mark.parametrize("number", range(COUNT), ids=NAMES)
@pytest.mark.usefixtures("all_checks")
def test_case(number: int) -> None:
    try:
        refusal = refusal_of(CASES[number], run_case)
    except Exception:
        print(script(CASES[number]))  # the reproducer
        raise
    assert REFUSED[number] in refusal if number in REFUSED else not refusal


def test_every_choice_is_tested() -> None:
    assert len(CHOICES["mesh"]) <= COUNT
    for name, choices in CHOICES.items():
        assert {repr(case[name]) for case in CASES} == {repr(one) for one in choices}


SHOWS = {  # what of a simple case shows a planted fault
    "no f": {"mesh": (2, 1, 1, 1)},
    "no g": {"mesh": (2, 1, 1, 1)},
    "bias on every rank": {"mesh": (2, 1, 1, 1)},
    "mean of microbatch means": {"microbatches": 2, "ignored": "default"},
    "no tied sum": {"mesh": (1, 2, 1, 1), "head": "assigned"},
    "other masks": {"dropout": 0.4, "dropout of branches": True},
}


@pytest.mark.one_in(6)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_shows(fault: str) -> None:
    case = Case(SIMPLEST.picks | SHOWS[fault])
    run_case(case)
    with planted(fault), pytest.raises(InternalError, match="differs from the model"):
        run_case(case)


def test_features_can_be_left_out() -> None:
    """A feature whose fault is known must not hide the others."""
    seen: list[Case] = []
    run_round(10, 0, Tally(), seen.append, without=["layer number", "mesh"])
    assert {case["layer number"] for case in seen} == {"none"} and {case["mesh"] for case in seen} == {
        (1, 1, 1, 1)
    }
    assert len({case["schedule"] for case in seen}) > 1


LOADED = {"buffer": "loaded", "mesh": (2, 1, 1, 1), "layers": 1}


def test_a_buffer_that_is_not_loaded_shows() -> None:
    case = Case(SIMPLEST.picks | LOADED)
    assert "check_loaded(" in script(case)
    right = ParallelModel.load_state_dict

    def forgetful(self: ParallelModel, state: dict[str, Any]) -> object:
        return right(self, {name: x for name, x in state.items() if name != "kept"}, strict=False)

    with (
        mock.patch.object(ParallelModel, "load_state_dict", forgetful),
        pytest.raises(InternalError, match="differs"),
    ):
        run_case(case)


def fails_on_two_features(case: Case) -> None:
    if case["gate"] == "fused" and case["layers"] > 2:
        raise ValueError(f"wrong by {case['length']}.5e-3")


@pytest.mark.thorough  # half a minute
def test_search_shrinks_to_what_matters(tmp_path: Path) -> None:
    """A failure of two features together: all others go back to the simplest; one script, found once."""
    shown: list[str] = []
    tally = search(60, 5.0, 0, tmp_path, fails_on_two_features, shown.append)
    assert list(tally.findings) == ["ValueError: wrong by N"]
    text = (tmp_path / "finding_0.py").read_text()
    smallest = Case(SIMPLEST.picks | {"gate": "fused", "layers": 3})
    assert text.endswith(script(smallest))
    assert "ValueError: wrong by 4.5e-3" in text and any(text in one for one in shown)
    assert tally.outcomes["failed"] >= 1 and tally.outcomes["passed"] > tally.outcomes["failed"]
    assert "FOUND ValueError: wrong by N" in tally.report() and "gate" in tally.report()
    compile(text, "finding_0.py", "exec")


def test_search_counts_refusals() -> None:
    def refuse(case: Case) -> None:
        if case["bias"]:
            raise PlanError("somewhere", f"{case['layers']} layers are too many", "none")

    tally = Tally()
    assert run_round(10, 0, tally, refuse) is None
    assert list(tally.refusals) == ["PlanError: N layers are too many"]
    assert tally.outcomes["refused"] == tally.refusals.total() and tally.ran == 10
