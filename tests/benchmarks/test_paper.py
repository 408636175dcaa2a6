"""Figures as text and pictures, and what of the papers' figures is stated as a number."""

from __future__ import annotations

import pytest

from autoptd.wings.planner.search import search
from benchmarks.lib import bloom
from benchmarks.lib.figures import Figure, best, figure_rows, picture, spread, text_table, verdict
from benchmarks.lib.points import Point
from benchmarks.lib.sc21_figures import FIGURES, bubble, falls
from benchmarks.lib.subramanian import GPT3_1T
from benchmarks.lib.subramanian_figures import SAMPLES, days_of, describe, model_of, placed


def test_a_figure_as_a_table_and_a_picture() -> None:
    figure = Figure("f", "A & B", "x", "y", {"one": {1: 2.0, 4: 8.0}, "two": {1: None}}, "grows", "grows")
    assert figure_rows(figure) == [
        {"x": "1", "one": "2", "two": "does not fit"},
        {"x": "4", "one": "8", "two": ""},
    ]
    assert text_table(figure_rows(figure)).splitlines()[0] == "| x | one | two |"
    drawn = picture(figure)
    assert drawn.count("<circle") == 2 and "A and B" in drawn
    assert best(figure.series["one"]) == 4 and spread(figure.series["one"]) == 4


def test_verdicts() -> None:
    assert [verdict(True, True), verdict(True, False), verdict(False)] == ["yes", "in part", "no"]
    assert falls({1: 3.0, 2: 3.0, 4: 1.0}) and not falls({1: 1.0, 2: 2.0})


def test_every_figure_of_sc21_is_there_and_the_bubble_is_its_formula() -> None:
    assert len(FIGURES) == 11
    assert bubble().agrees == "yes"


def test_days_of_training_are_those_of_the_fastest_step() -> None:
    found = search(model_of(GPT3_1T, "1D", "H200", 8, gpus=4096), keep=1)
    days = days_of(GPT3_1T, "1D", ("H200", 8), 4096)
    assert days == pytest.approx(float(found.seconds[0]) * SAMPLES[GPT3_1T] / 4096 / 86400)
    assert (
        (days_of(GPT3_1T, "1D", ("A100", 8), 4096) or 0)
        > (days or 0)
        > (days_of(GPT3_1T, "1D", ("B200", 8), 4096) or 0)
    )


def test_a_configuration_is_placed_as_the_search_places_it() -> None:
    model = model_of(GPT3_1T, gpus=4096)
    found = search(model, keep=1)
    config = tuple(int(found.columns[name][0]) for name in ("t1", "t2", "p"))
    mine = placed(model, [config])  # type: ignore[list-item]
    assert int(found.columns["b"][0]) == 1 and model.seconds(mine)[0] == pytest.approx(found.seconds[0])
    (row,) = describe(model, mine)
    assert row["p"] == config[2] and "does not fit" not in row["GB"]
    assert sum(int(text) for name, text in row.items() if name.endswith("%")) == pytest.approx(100, abs=3)
    assert SAMPLES[GPT3_1T] == 488281250


def test_days_of_the_sweep_are_not_compared_by_their_lines() -> None:
    """A line number is no text: line 1005 is after line 607."""
    points = [
        Point(name, 1.0, 1.0)
        for name in ("02-20, line 476: h=1", "02-21, line 607: h=1", "02-28, line 1005: h=1")
    ]
    assert [bloom.is_of_the_first_day(one) for one in points] == [True, False, False]
