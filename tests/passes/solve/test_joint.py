"""Two axes solved together, against trying every pair and against both sequential orders; the lower bound."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Node

import autoptd
from autoptd.ir.notes import note
from autoptd.passes.solve import joint
from autoptd.passes.solve import minimize as minimizer
from autoptd.passes.solve.assign import write_solved
from autoptd.passes.solve.assignment import Assignment
from autoptd.passes.solve.minimize import (
    Answer,
    Factor,
    Found,
    Left,
    Pair,
    TableTooLarge,
    minimize,
    minimize_pairs,
    narrowed,
    price,
    tighten,
)
from autoptd.passes.solve.problem import Solved
from autoptd.passes.solve.splits import Splitter
from examples.gpt import GPT, GPTConfig

NAMES = ("first", "second")


def random_pair(seed: int) -> tuple[Pair, list[dict[int, int]]]:
    """Up to six variables: most choose pairs of up to 3 x 3 parts, of which some do not go together; some have no parts.

    Costs are small and whole, so that ties are common, and some are forbidden; all parts 0 are possible.
    """
    draw = np.random.default_rng(seed)
    choices, parts = [], {}
    for variable in range(int(draw.integers(2, 7))):
        if draw.random() < 0.2:
            choices.append(int(draw.integers(1, 5)))
            continue
        sizes = draw.integers(1, 4, 2)
        pairs = [both for both in np.ndindex(*sizes) if both == (0, 0) or draw.random() < 0.8]
        parts[variable] = np.array(pairs)
        choices.append(len(pairs))
    factors: list[Factor] = []
    for _ in range(int(draw.integers(1, 12))):
        arity = int(draw.integers(1, min(3, len(choices)) + 1))
        names = tuple(int(name) for name in draw.permutation(len(choices))[:arity])
        table = draw.integers(0, 9, [choices[name] for name in names]).astype(float)
        table[draw.random(table.shape) < 0.1] = math.inf
        table.flat[0] = 8.0
        factors.append((names, table))
    order = [int(variable) for variable in draw.permutation(len(choices))]
    alone = []
    for axis in (0, 1):
        alone.append({variable: int(draw.choice(both[:, axis])) for variable, both in parts.items()})
    # One of the orders can always be solved.
    alone[int(draw.integers(2))] = dict.fromkeys(parts, 0)
    return Pair(choices, factors, parts, order), alone


def least_cost(pair: Pair) -> float:
    answers = itertools.product(*map(range, pair.choices))
    return min(price(answer, pair.factors) for answer in answers)


def check(pair: Pair, answer: Answer) -> None:
    assert answer.cost == price(answer.choices, pair.factors)
    assert answer.bound <= answer.cost <= min(answer.sequential.values())


@pytest.mark.parametrize("first", range(0, 200, 25))
def test_equal_to_brute_force(first: int) -> None:
    found_more = 0
    for seed in range(first, first + 25):
        pair, alone = random_pair(seed)
        answer = minimize_pairs(pair, alone, NAMES)
        check(pair, answer)
        assert answer.is_exact and answer.cost == least_cost(pair), seed
        found_more += answer.cost < min(answer.sequential.values())
    # Else the comparison would say nothing of pairs.
    assert found_more


@pytest.mark.parametrize("seed", range(200))
def test_the_bound_is_one_and_no_choice_of_a_least_answer_is_dropped(seed: int) -> None:
    pair, _ = random_pair(seed)
    least = least_cost(pair)
    for cost in (least, least + 3):
        bound, left = tighten(pair.choices, pair.factors, cost, pair.order)
        assert bound <= least
        for answer in itertools.product(*map(range, pair.choices)):
            if price(answer, pair.factors) <= cost:
                assert all(choice in each for choice, each in zip(answer, left, strict=True))


def test_the_bound_of_a_chain_is_its_least_cost() -> None:
    draw = np.random.default_rng(0)
    factors = [((i, i + 1), draw.integers(0, 1000, (5, 5)).astype(float)) for i in range(60)]
    least = price(minimize([5] * 61, factors), factors)
    bound, left = tighten([5] * 61, factors, least)
    assert bound == pytest.approx(least, rel=1e-8)
    assert sum(map(len, left)) < 90


def test_where_tables_are_too_large_the_gap_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left is the answer of the descent, and a bound of the least cost."""
    gaps = 0
    for seed in range(60):
        pair, alone = random_pair(seed)
        least = least_cost(pair)
        with monkeypatch.context() as patch:
            patch.setattr(minimizer, "minimize_left", too_large_without(minimizer.minimize_left))
            answer = minimize_pairs(pair, alone, NAMES)
        check(pair, answer)
        assert answer.bound <= least <= answer.cost
        assert answer.is_exact or answer.gap > 0
        gaps += not answer.is_exact
    assert gaps


def too_large_without(solve: Callable[[Pair, Left | None], Found]) -> Callable[[Pair, Left | None], Found]:
    """Return a solver that refuses choices of which several parts of both axes are left."""

    def solved(pair: Pair, left: Left | None) -> Found:
        for variable, parts in pair.parts.items() if left is not None else ():
            if len(left[variable]) > max(len(set(parts[left[variable], axis])) for axis in (0, 1)):
                raise TableTooLarge.of_solver()
        return solve(pair, left)

    return solved


class Block(nn.Module):
    """Tokens, a layer of two products, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(8, 8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return (x + self.down(F.gelu(self.up(x)))).square().mean()


def pairs_of(monkeypatch: pytest.MonkeyPatch, model: nn.Module, **mesh: Any) -> tuple[Pair, Answer]:
    """Return what is minimised when a model is compiled, and the answer."""
    seen: list[tuple[Pair, Answer]] = []

    def solved(pair: Pair, alone: list[dict[int, int]], names: tuple[str, str]) -> Answer:
        seen.append((pair, minimize_pairs(pair, alone, names)))
        return seen[-1][1]

    monkeypatch.setattr(joint, "minimize_pairs", solved)
    ids = torch.randint(8, (2, 8), generator=torch.manual_seed(0))
    autoptd.compile(model, **mesh, example_inputs=(ids,))
    return seen[0]


def test_a_model_equal_to_brute_force(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every operator the pair that was chosen, and another one or two."""
    pair, chosen = pairs_of(monkeypatch, Block(), t=2, c=2, sequence_parallel="auto")
    assert chosen.is_exact
    dearest = 0.0
    for seed in range(5):
        draw = np.random.default_rng(seed)
        left = []
        for i, count in enumerate(pair.choices):
            others = draw.permutation(count)[: 1 + (seed == 0 and i % 8 == 0)]
            left.append(np.unique([*others, chosen.choices[i]]))
        parts = {variable: both[left[variable]] for variable, both in pair.parts.items()}
        small = Pair([len(each) for each in left], list(narrowed(pair.factors, left)), parts, pair.order)
        # From the dearest plan that there is, and from one part of the answer.
        alone = [{}, {}]
        for variable, both in parts.items():
            place = int(np.flatnonzero(left[variable] == chosen.choices[variable])[0])
            alone[0][variable], alone[1][variable] = int(both[place, 0]), int(both[-1, 1])
        answer = minimize_pairs(small, alone, NAMES)
        assert answer.is_exact and answer.cost == chosen.cost == least_cost_of_tables(small)
        dearest = max(dearest, answer.sequential["second"])
    assert dearest > chosen.cost


class Reversed(nn.Module):
    """Layers that are used in another order than they are registered in."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(8, 8), nn.LayerNorm(8)
        self.ups = nn.ModuleList(nn.Linear(8, 16) for _ in range(3))
        self.downs = nn.ModuleList(nn.Linear(16, 8) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for up, down in zip(reversed(self.ups), reversed(self.downs), strict=True):
            x = x + down(F.gelu(up(self.norm(x)))).tanh()
        return x.square().mean()


def test_what_is_left_over_tp_stands_at_the_nodes_that_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of parameters that is the one of the layer that is used first, not the first in the graph."""
    seen: list[tuple[Solved, list[Node]]] = []

    def written(solved: Solved, splitter: Splitter) -> Assignment:
        seen.append((solved, list(solved.problem.strategies)))
        return write_solved(solved, splitter)

    monkeypatch.setattr(sys.modules["autoptd.passes.annotate"], "write_solved", written)
    ids = torch.randint(8, (2, 8), generator=torch.manual_seed(0))
    autoptd.compile(Reversed(), t=2, c=2, example_inputs=(ids,))
    (solved, made), *_ = seen
    same, variable = solved.problem.strategies.same, solved.problem.variable
    assert any(note(node).kind == "param" and same[node] is not node for node in same)
    # One list for each variable, of the node that all others are tied to.
    assert made == [node for node in variable if same.get(node, node) is node]
    assert [len(solved.problem.strategies[node]) for node in made] == solved.problem.choices[: len(made)]


def least_cost_of_tables(pair: Pair) -> float:
    """Try all answers at once: one table over all variables."""
    total = np.zeros(pair.choices)
    for names, table in pair.factors:
        order = sorted(range(len(names)), key=names.__getitem__)
        shape = [count if variable in names else 1 for variable, count in enumerate(pair.choices)]
        total = total + table.transpose(order).reshape(shape)
    return float(total.min())


# Problems of a prototype, a GPT of h=2048 on H100s, at its costs: half of a ring hidden, one speed for all links. By (c, t,
# tokens, heads, layers) the price of cp first and of tp first over the least, which it found by tables ten times as large.
PROTOTYPE = {
    (4, 4, 8192, 16, 2): (1.000, 1.042),
    (4, 4, 8192, 8, 2): (1.101, 1.044),
    (4, 4, 8192, 8, 12): (1.155, 1.067),
    (8, 2, 8192, 8, 2): (1.012, 1.035),
    (2, 2, 2048, 16, 2): (1.000, 1.003),
}


def prototype(row: tuple[int, ...]) -> tuple[Pair, list[dict[int, int]], np.ndarray]:
    """Return a problem, the parts of either axis alone, and the costs that the prototype found: least, tp first, cp first."""
    c, t, tokens, heads, layers = row
    with np.load(Path(__file__).with_name("prototype.npz")) as file:
        start = f"c={c} t={t} {tokens} tokens {heads} heads {layers} layers: "
        found = {key.removeprefix(start): file[key] for key in file.files if key.startswith(start)}
    choices = found["choices"].tolist()
    factors, begin = [], 0
    for padded in found["names"].tolist():
        names = tuple(name for name in padded if name >= 0)
        shape = [choices[name] for name in names]
        end = begin + math.prod(shape)
        factors.append((names, found["values"][found["tables"][begin:end]].reshape(shape)))
        begin = end
    pieces = np.split(found["parts"].astype(int), np.cumsum(choices)[:-1])
    parts = {variable: both for variable, both in enumerate(pieces) if both[0, 0] >= 0}
    alone = [{variable: int(each[variable]) for variable in parts} for each in found["alone"]]
    return Pair(choices, factors, parts, found["order"].tolist()), alone, found["costs"]


@pytest.mark.parametrize("row", PROTOTYPE, ids=str)
def test_the_gap_of_an_order_at_the_costs_of_a_prototype(row: tuple[int, ...]) -> None:
    pair, alone, (least, *orders) = prototype(row)
    answer = minimize_pairs(pair, alone, ("tp", "cp"))
    check(pair, answer)
    assert answer.cost == least and [answer.sequential[axis] for axis in ("tp", "cp")] == orders
    cp_first, tp_first = (round(answer.sequential[axis] / answer.cost, 3) for axis in ("cp", "tp"))
    assert (cp_first, tp_first) == PROTOTYPE[row]
    # Without a proof, by how much it may be off.
    assert answer.is_exact or (row[:2] == (2, 2) and answer.gap < 0.03)


# (c, t, tokens, heads, layers), and by how many percent tp first is dearer. Two layers or twelve are one problem, tied.
DEARER = {
    (4, 4, 8192, 16, 2): 5.88,
    (4, 4, 8192, 8, 2): 11.74,
    (4, 4, 8192, 8, 12): 17.47,
    (8, 2, 8192, 8, 2): 20.06,
    (2, 2, 2048, 16, 2): 0.0,
}


@pytest.mark.thorough
@pytest.mark.one_in(9)
@pytest.mark.parametrize(("c", "t", "tokens", "heads", "layers"), DEARER)
def test_the_gap_of_an_order_at_the_size_of_a_model(
    c: int, t: int, tokens: int, heads: int, layers: int
) -> None:
    """A GPT of h=2048: cp first finds the least price here, tp first takes heads that cp needs."""
    sizes = {"n_layer": layers, "n_head": heads, "n_embd": 2048}
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=50304, block_size=tokens, **sizes))
        ids = torch.zeros(2, tokens, dtype=torch.long)
    mesh = {"t": t, "c": c, "sequence_parallel": "auto", "num_microbatches": 1}
    program = autoptd.compile(model, **mesh, machine="h100", example_inputs=(ids, ids))
    (line,) = [line for line in program.explain("").splitlines() if "together" in line]
    assert line.endswith(
        f"exact, no other plan costs less; tp first +{DEARER[c, t, tokens, heads, layers]:.2f}%, cp first +0.00%"
    )
