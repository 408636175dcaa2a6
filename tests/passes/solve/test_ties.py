"""Repeated layers get one answer, and it is as good as an answer for every layer by itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import autoptd
from autoptd.passes.solve import assign
from autoptd.passes.solve.minimize import price
from autoptd.program.program import Program
from examples.gpt import GPT, GPTConfig
from tests.codegen.test_repeats import Stack, batch


def solve(
    model: nn.Module, inputs: Any, t: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[Program, list[float]]:
    """The program of the tied solver, and the costs that it found: tied, then with every layer by itself.

    Layers by themselves would dodge the price of a first layer that is not like the others: there is none here.
    """
    costs: list[float] = []
    monkeypatch.setattr("autoptd.passes.ops.costs.PER_ODD_LAYER", 0.0)
    solver = assign.solve_tied

    def both(solved: Any, strategies: Any, prices: Any, ties: Any, **keywords: Any) -> Any:
        found = solver(solved, strategies, prices, ties, **keywords)
        free = solver(
            solved, assign.strategies_of(prices.splitters[0], {}), prices, replace(ties, same={}), **keywords
        )
        costs.extend(price(one.problem.answer, one.problem.factors) for one in (found, free))
        return found

    monkeypatch.setattr(assign, "solve_tied", both)
    return autoptd.compile(model, t=t, num_microbatches=2, example_inputs=inputs), costs


def gpt(layers: int, width: int) -> tuple[nn.Module, Any]:
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=256, block_size=32, n_layer=layers, n_head=4, n_embd=width))
        ids = torch.zeros(8, 32, dtype=torch.long)
    return model, (ids, ids.clone())


@pytest.mark.parametrize(
    "layers, width, t",
    [
        (2, 64, 2),
        (3, 128, 4),
        pytest.param(5, 256, 2, marks=pytest.mark.thorough),
        pytest.param(2, 64, 4, marks=pytest.mark.thorough),
        pytest.param(3, 128, 2, marks=pytest.mark.thorough),
        pytest.param(5, 256, 4, marks=pytest.mark.thorough),
    ],
)
def test_the_tied_optimum_is_the_optimum(
    layers: int, width: int, t: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, (tied, free) = solve(*gpt(layers, width), t, monkeypatch)
    assert (
        free <= tied <= free * 1.0001
    )  # a nanosecond more: the last layer is like the others, though the head could use less
    assert tied == free or layers > 3
    types: dict[str, set[str]] = {}
    for one in program.params:
        if ".h." in one.name:
            types.setdefault(one.name.split(".", 3)[3], set()).add(str(one.use.layout["tp"]))
    assert all(len(found) == 1 for found in types.values()) and len(types) == 12


@pytest.mark.parametrize(
    "way",
    [
        "same",
        *(pytest.param(way, marks=pytest.mark.thorough) for way in ("skip", "masks", "kinds", "two stacks")),
    ],
)
def test_the_ends_cost_little(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In models so small that a layer costs as little as a conversion, free ends would save something, but never a layer."""
    torch.manual_seed(0)
    _, (tied, free) = solve(Stack(way, 6), batch(), 2, monkeypatch)
    assert free <= tied <= free * (1 + 1 / 6)
