"""A keyword is declared once, as a field of `Options`: signature, flags, plan and choices follow from it."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest

import autoptd
from autoptd.ir.keyword import NOT_YET
from autoptd.options import KEYWORDS, Keyword, Options
from autoptd.wings.cli.parser import FLAGS, make_parser, parse
from autoptd.wings.cli.programs import keywords_of

NO_OPTIONS = {
    "model",
    "example_inputs",
    "weights",
    "gpus",
    "later",
}  # parameters that are no field of Options
IN_PLANS_ONLY = {"memory_price"}  # what a saved plan tells, and nobody types


def test_the_signature_of_parallelize_has_the_fields_of_options() -> None:
    taken = set(inspect.signature(autoptd.parallelize).parameters)
    assert taken - NO_OPTIONS == set(KEYWORDS) - IN_PLANS_ONLY
    assert taken > NO_OPTIONS
    # Of a keyword that exists in part, every choice is there.
    for name in taken & set(NOT_YET):
        assert set(KEYWORDS[name].choices) <= set(NOT_YET[name].neutral)
    for name, parameter in inspect.signature(autoptd.parallelize).parameters.items():
        default = getattr(Options, name, None) if name in KEYWORDS else None
        assert parameter.default in (None, inspect.Parameter.empty, default), name


def test_every_keyword_is_declared_and_its_default_is_a_choice() -> None:
    for field in dataclasses.fields(Options):
        keyword = KEYWORDS[field.name]
        assert keyword.flag == "" or keyword.flag in FLAGS
        assert field.default is None or keyword.allows(field.default)


def test_a_new_keyword_has_a_flag_and_is_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KEYWORDS, "new_degree", Keyword("count", "of something new"))
    monkeypatch.setitem(
        KEYWORDS, "new_way", Keyword("choice", choices=("left", "right"), is_for_training=True)
    )
    _, commands = make_parser()
    assert (
        "--new-way" not in commands["show"].format_help() and "--new-way" in commands["train"].format_help()
    )
    asked = parse("train gpt2 --new-degree 4 --new-way left --t 2 --option nan=ignore".split())
    assert keywords_of(asked) == {"t": 2, "new_degree": 4, "new_way": "left", "nan": "ignore"}
    with pytest.raises(autoptd.PlanError, match="--new-way: invalid choice"):
        parse("train gpt2 --new-way up".split())


@pytest.mark.parametrize("name", [name for name, keyword in KEYWORDS.items() if keyword.flag == "count"])
def test_a_count_is_a_whole_number_of_at_least_1(name: str) -> None:
    for value in (0, 1.0, True, "2"):
        with pytest.raises(autoptd.PlanError, match="must be an integer of at least 1"):
            Options(**{name: value})  # type: ignore[arg-type]
    with pytest.raises(autoptd.PlanError, match="is below 1"):
        command = "train" if KEYWORDS[name].is_for_training else "show"
        parse([command, "gpt2", f"--{name.replace('_', '-')}", "0"])


@pytest.mark.parametrize(
    "given",
    [
        {"nan": "drop"},
        {"p2p": None},
        {"sequence_parallel": 1},
        {"fuse": True},
        {"fuse": 0},
        {"backend": "mpi"},
    ],
    ids=str,
)
def test_other_values_than_the_choices_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(autoptd.PlanError, match="no such choice"):
        Options(**given)
