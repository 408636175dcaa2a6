"""What a rank can do: names, numbers, and how a plan spells them."""

from __future__ import annotations

import json
from typing import Any

import pytest

import autoptd
from autoptd import Machine, PlanError
from autoptd.ir.machine import find_machine, machine_names, machine_of_device, machine_record
from autoptd.options import make_options
from autoptd.wings.planner.cluster import find_cluster
from tests.parity.models import batch, gpt

SLOW = Machine(link_bandwidth=1e9, latency=1e-4, memory=1e9)


@pytest.mark.parametrize("given", [None, "h100", *machine_names(), SLOW, Machine(), {"flops": 1e12}], ids=str)
def test_a_plan_spells_what_is_meant(given: Any) -> None:
    again = json.loads(json.dumps(machine_record(given)))
    assert find_machine(again) == find_machine(given)
    assert make_options(machine=given, plan={"options": {"machine": again}}).rank_machine == find_machine(
        given
    )


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("h10", r"machine='h10': no such machine.*h100"),
        (3, r"machine: is an int"),
        ({"flop": 1.0}, r"machine: unknown key 'flop'.*flops"),
        ({"flops": 0}, r"machine: flops=0: must be a positive number"),
        ({"latency": -1.0}, r"machine: latency=-1.0"),
        ({"flops": "fast"}, r"machine: flops='fast'"),
        ({"flops": float("inf")}, r"machine: flops=inf: must be finite"),
    ],
)
def test_what_is_no_machine_is_refused(given: Any, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        make_options(machine=given)


def test_a_plan_and_a_keyword_that_differ_are_refused() -> None:
    with pytest.raises(PlanError, match=r"the plan sets machine='a100', the keyword machine='h100'"):
        make_options(machine="h100", plan={"options": {"machine": "a100"}})


def test_the_keyword_memory_goes_before_the_machines() -> None:
    assert make_options(machine="h100").rank_machine.memory == 72e9
    assert make_options(machine="h100", memory=1e9).rank_machine.memory == 1e9


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("a100", (218.4e12, 1631.2e9, 240e9, 15e-6, 20e9, 8, 20e-6, 72e9)),
        ("h100", (692.3e12, 2680e9, 360e9, 15e-6, 40e9, 8, 20e-6, 72e9)),
        ("h200", (692.3e12, 3840e9, 360e9, 15e-6, 40e9, 8, 20e-6, 126.9e9)),
        ("laptop-cpu", (40e9, 10e9, 1e9, 300e-6, 0.1e9, 8, 300e-6, 4e9)),
        ("perlmutter", (218.4e12, 1631.2e9, 0.65 * 300e9, 15e-6, 0.67 * 25e9, 4, 20e-6, 0.85 * 84.9e9)),
        ("jean-zay-a100", (218.4e12, 1631.2e9, 240e9, 15e-6, 0.8 * 12.5e9 / 2, 8, 20e-6, 0.85 * 84.9e9)),
    ],
)
def test_what_is_derived_of_a_file(name: str, numbers: tuple[float, ...]) -> None:
    """The first four are to the bit what plans were weighed for when each had a table of its own."""
    fields = "flops memory_bandwidth link_bandwidth latency network_bandwidth ranks_per_node message memory".split()
    assert find_machine(name) == Machine(**dict(zip(fields, numbers, strict=True)))  # type: ignore[arg-type]


def test_solver_and_planner_take_the_same_names() -> None:
    for name in machine_names():
        assert find_cluster(name).name == name and find_machine(name).flops > 0
        short = name.removeprefix("dgx-")
        assert find_cluster(short) == find_cluster(name) and find_machine(short) == find_machine(name)
    assert (
        machine_of_device("NVIDIA H100 80GB HBM3") == "dgx-h100" and machine_of_device("NVIDIA L40S") is None
    )


def test_the_plan_is_weighed_for_it() -> None:
    """Collectives that take a second each leave a small GPT whole on every rank, but for what a redundant product costs."""
    costs = [{"latency": 1e-9}, {"latency": 1.0}, {"latency": 1.0, "redundant": 1e-9}]
    programs = [autoptd.compile(gpt(2), t=2, example_inputs=batch(), machine=Machine(**one)) for one in costs]
    split, still, whole = ({one.use.layout["tp"].kind for one in program.params} for program in programs)
    assert split > {"S"} and still > {"S"} and whole == {"I"}
    assert programs[2].plan["options"]["machine"] == costs[2]
    with pytest.raises(PlanError, match="the fullest rank takes"):
        autoptd.compile(gpt(2), t=2, example_inputs=batch(), machine=Machine(memory=1e3))
