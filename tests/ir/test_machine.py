"""What a rank can do: names, numbers, and how a plan spells them."""

from __future__ import annotations

import json
from typing import Any

import pytest

import autoptd
from autoptd import Machine, PlanError
from autoptd.ir.machine import PRESETS, find_machine, spelled
from autoptd.options import make_options
from tests.parity.models import batch, gpt

SLOW = Machine(link_bandwidth=1e9, latency=1e-4, memory=1e9)


@pytest.mark.parametrize("given", [None, *PRESETS, SLOW, Machine(), {"flops": 1e12}], ids=str)
def test_a_plan_spells_what_is_meant(given: Any) -> None:
    again = json.loads(json.dumps(spelled(given)))
    assert find_machine(again) == find_machine(given)
    assert make_options(machine=given, plan={"options": {"machine": again}}).rank_machine == find_machine(given)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("h10", r"machine='h10': no such machine.*h100"),
        (3, r"machine: is a int"),
        ({"flop": 1.0}, r"machine: has a key 'flop'.*flops"),
        ({"flops": 0}, r"machine: flops=0: no positive number"),
        ({"latency": -1.0}, r"machine: latency=-1.0"),
        ({"flops": "fast"}, r"machine: flops='fast'"),
        ({"flops": float("inf")}, r"machine: flops=inf: is not finite"),
    ],
)
def test_what_is_no_machine_is_refused(given: Any, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        make_options(machine=given)


def test_a_plan_and_a_keyword_that_differ_are_refused() -> None:
    with pytest.raises(PlanError, match=r"the plan says machine='a100', the keyword machine='h100'"):
        make_options(machine="h100", plan={"options": {"machine": "a100"}})


def test_the_keyword_memory_goes_before_the_machines() -> None:
    assert make_options(machine="h100").rank_machine.memory == 72e9
    assert make_options(machine="h100", memory=1e9).rank_machine.memory == 1e9


def test_the_plan_is_weighed_for_it() -> None:
    """Collectives that take a second each leave a small GPT whole on every rank, but for what a redundant product costs."""
    costs = [{"latency": 1e-9}, {"latency": 1.0}, {"latency": 1.0, "redundant": 1e-9}]
    programs = [autoptd.compile(gpt(2), t=2, example_inputs=batch(), machine=Machine(**one)) for one in costs]
    split, still, whole = ({one.layout["tp"].kind for one in program.params} for program in programs)
    assert split > {"S"} and still > {"S"} and whole == {"I"}
    assert programs[2].plan["options"]["machine"] == costs[2]
    with pytest.raises(PlanError, match="the fullest rank holds"):
        autoptd.compile(gpt(2), t=2, example_inputs=batch(), machine=Machine(memory=1e3))
