"""The covering part of the grid of `tests/grid.py`, and that its refusals and its failures are what they are said to be."""

from __future__ import annotations

import itertools
from unittest import mock

import pytest

from autoptd.errors import PlanError
from tests import grid
from tests.grid import FACTORS, Case, Tally, covering, settings

SIMPLE = Case("gpt", "1f1b", t=1, p=2, d=1, v=1, m=4)


@pytest.mark.thorough  # on every run: parity/covering.py
@pytest.mark.parametrize("case", covering(), ids=str)
def test_case(case: Case) -> None:
    assert Tally().count(case) == ""


@pytest.mark.thorough
def test_every_pair_of_values_is_covered() -> None:
    def pairs(cases: list[Case]) -> set[object]:
        return {pair for case in cases for pair in itertools.combinations(zip(FACTORS, case, strict=True), 2)}

    assert pairs(covering()) == pairs(grid.grid())


MISFITS = [
    SIMPLE._replace(v=2),
    SIMPLE._replace(p=1, v=3, schedule="interleaved"),
    SIMPLE._replace(p=1, v=2, schedule="zbv"),
    SIMPLE._replace(p=1, schedule="zbv"),
    SIMPLE._replace(schedule="zbv"),
]


@pytest.mark.one_in(9)
@pytest.mark.parametrize("case", MISFITS)
def test_what_does_not_fit_is_refused_with_settings_that_work(case: Case) -> None:
    assert case in [one._replace(model="gpt") for one in grid.misfits()]
    tally = Tally()
    assert tally.count(case) == "" and tally.outcomes == {"refused": 1}
    assert {
        one: error for one, error in tally.seen.items() if error is None
    }  # what the remedy offers was run


def test_settings_are_read_from_a_remedy() -> None:
    def offered(remedy: str) -> list[Case]:
        return settings(PlanError("somewhere", "no", remedy), SIMPLE)

    assert offered("num_microbatches=4 or 8") == [SIMPLE, SIMPLE._replace(m=8)]
    both = [SIMPLE._replace(v=1), SIMPLE._replace(p=3, schedule="interleaved")]
    assert offered("v=1, or p >= 3 with schedule='interleaved'") == both
    assert offered("look elsewhere") == []


REFUSAL = PlanError("m", "no", "num_microbatches=8")


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        ([ValueError("wrong")], "ValueError: wrong"),
        ([REFUSAL, ValueError("wrong")], "m8 raises wrong"),
        ([PlanError("m", "no", "nothing")], "names no settings"),
    ],
)
def test_failures_are_told(raised: list[Exception], told: str) -> None:
    tally = Tally()
    with mock.patch.object(grid, "run", side_effect=raised):
        assert told in tally.count(SIMPLE)
    assert tally.outcomes == {"failed": 1}
