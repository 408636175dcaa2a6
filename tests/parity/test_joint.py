"""Plans over tp and cp that an order of both does not find: the numbers of one device, and what `explain` says of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

import autoptd
from autoptd.ir.machine import Machine
from tests.parity.models import batch, gpt, separate
from tests.parity.rotary import llama, neox

# Prices of a small model are like those of a large one where messages take no time, and products take long.
FAST_LINKS = Machine(flops=3e12, latency=1e-12)
SLOW_PRODUCTS = Machine(flops=1e11, latency=1e-12, memory_bandwidth=1e12)
FOUR_CONTEXT_RANKS = {"t": 2, "c": 4}
FOUR_TENSOR_RANKS = {"t": 4, "c": 2, "sequence_parallel": "auto"}
# (model, mesh, machine, which orders are dearer)
DEARER: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], Machine, set[str]]] = {
    "gpt, products": (lambda: gpt(2), FOUR_TENSOR_RANKS, SLOW_PRODUCTS, {"tp", "cp"}),
    "llama": (lambda: llama(4, width=32, heads=8), FOUR_TENSOR_RANKS, FAST_LINKS, {"tp", "cp"}),
    "gpt, links": (lambda: gpt(2), FOUR_CONTEXT_RANKS, FAST_LINKS, {"tp"}),
    "gpt, tokens": (lambda: gpt(2), FOUR_CONTEXT_RANKS | {"sequence_parallel": "auto"}, FAST_LINKS, {"tp"}),
}


def orders(program: Any, module: str) -> dict[str, float]:
    """Return by how much of the price each order is dearer, in percent, as `explain` says."""
    text = program.explain(module)
    (line,) = [line for line in text.splitlines() if "together" in line]
    assert "exact, no other plan costs less" in line
    found = dict(re.findall(r"(\w+) first (?:\+([\d.]+)%|no plan)", line))
    assert found.keys() == {"tp", "cp"}
    return {axis: float(percent or "inf") for axis, percent in found.items()}


@pytest.mark.parametrize("name", DEARER, ids=DEARER)
def test_a_plan_that_an_order_does_not_find_is_right(name: str) -> None:
    make, mesh, machine, dearer = DEARER[name]
    program = autoptd.compile(make(), **mesh, machine=machine, example_inputs=batch())
    found = orders(program, "")
    assert {axis for axis, percent in found.items() if percent > 0} == dearer
    autoptd.verify(make(), **mesh, machine=machine, example_inputs=batch(), steps=1)


MESHES = [
    {"t": 2, "c": 2},
    {"t": 2, "c": 2, "sequence_parallel": True},
    FOUR_CONTEXT_RANKS,
    FOUR_TENSOR_RANKS,
]
MODELS = {"gpt": lambda: gpt(2), "separate": separate, "llama": lambda: llama(2), "neox": neox}


@pytest.mark.thorough
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_no_order_is_cheaper(name: str, mesh: dict[str, Any]) -> None:
    program = autoptd.compile(MODELS[name](), **mesh, example_inputs=batch())
    assert min(orders(program, "").values()) >= 0
