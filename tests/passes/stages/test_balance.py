"""Where to cut: against all ways there are, for one stage per rank and for several; memory as a bound."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoptd.ir.actions import ranks_of_stages
from autoptd.passes.stages import balance
from autoptd.passes.stages.balance import Level, Line, Value, evaluate, least_memory, place
from autoptd.schedule import build_orders, makespan_of


def stages_of(line: Line, chosen: Sequence[int]) -> list[float]:
    """Seconds of every stage, counted one by one."""
    bounds = [-1, *chosen, len(line.work) - 1]
    return [sum(line.work[a + 1 : b + 1]) + links_of(line, a, b) for a, b in pairwise(bounds)]


def links_of(line: Line, a: int, b: int) -> float:
    """What the stage of operators a + 1 to b receives, and sends."""
    received = [one for one in line.values if one.made <= a and any(a < reader <= b for reader in one.reads)]
    sent = [one for one in line.values if a < one.made <= b and max(one.reads) > b]
    return sum(one.seconds for one in [*received, *sent])


def loads_of(stages: list[float], ranks: Sequence[int]) -> list[float]:
    return [
        sum(cost for cost, rank in zip(stages, ranks, strict=True) if rank == one)
        for one in sorted(set(ranks))
    ]


@st.composite
def lines(draw: st.DrawFn) -> Line:
    work = draw(st.lists(st.sampled_from([0.0, 0.5, 1.0, 1.0, 2.0, 5.0]), min_size=4, max_size=10))
    points = sorted(draw(st.sets(st.integers(0, len(work) - 2), min_size=3)))
    values = [Value(i, (i + 1,), draw(st.sampled_from([0.1, 0.1, 0.4]))) for i in range(len(work) - 1)]
    for _ in range(draw(st.integers(0, 2))):  # skips, which some stages neither make nor read
        made = draw(st.integers(0, len(work) - 2))
        values.append(
            Value(made, tuple(sorted(draw(st.sets(st.integers(made + 1, len(work) - 1), min_size=1)))), 0.3)
        )
    return Line(work, points, values)


@settings(max_examples=150, deadline=None)
@given(lines(), st.integers(2, 4))
def test_one_stage_per_rank_is_exact(line: Line, p: int) -> None:
    found = place(line, range(p))
    if len(line.points) < p - 1:
        assert found is None
        return
    assert found is not None
    every = [stages_of(line, chosen) for chosen in combinations(line.points, p - 1)]
    least = min(max(stages) for stages in every)
    ours = stages_of(line, found.chosen)
    assert max(ours) == pytest.approx(least) == pytest.approx(max(found.loads)) == pytest.approx(found.bound)
    squares = min(sum(x * x for x in stages) for stages in every if max(stages) <= least * (1 + 1e-9))
    assert sum(x * x for x in ours) == pytest.approx(squares)


def score(stages: list[float], ranks: Sequence[int]) -> float:
    """The busiest rank, and a quarter of what the costliest stage of every chunk adds up to."""
    p = len(set(ranks))
    return max(loads_of(stages, ranks)) + 0.25 * sum(max(stages[i : i + p]) for i in range(0, len(stages), p))


@settings(max_examples=80, deadline=None)
@given(lines(), st.sampled_from([[0, 1, 0, 1], [0, 1, 1, 0]]), st.booleans())
def test_several_stages_per_rank(line: Line, ranks: list[int], by_moves: bool) -> None:
    """Exact where all ways are tried; by moves never worse than balanced stages, and never better than the best."""
    with pytest.MonkeyPatch.context() as patch:
        if by_moves:
            patch.setattr(balance, "MAX_COMBINATIONS", 0)
        found = place(line, ranks)
    assert found is not None
    least = min(score(stages_of(line, chosen), ranks) for chosen in combinations(line.points, 3))
    ours = score(stages_of(line, found.chosen), ranks)
    assert found.loads == pytest.approx(loads_of(stages_of(line, found.chosen), ranks))
    assert found.bound <= max(found.loads) * (1 + 1e-9)
    assert ours == pytest.approx(least) if not by_moves else least * (1 - 1e-9) <= ours <= 1.35 * least


def test_memory_is_a_bound() -> None:
    """The fastest cut would put three layers on one rank; its memory has room for two, and one microbatch more in flight."""
    line = Line([1.0] * 4 + [3.0], range(4), kept=[10.0] * 5, levels=[Level([1.0] * 5, [0.0] * 5)])
    free = place(line, [0, 1])
    assert free is not None and free.chosen in ((2,), (3,))
    live = [(2, 0), (0, 1)]
    bound = place(line, [0, 1], live, memory=33.0)
    assert bound is not None and bound.chosen == (1,) and bound.held == (24.0, 33.0)
    assert place(line, [0, 1], live, memory=32.0) is None and least_memory(line, [0, 1], live) == 33.0


def held_of(
    line: Line, chosen: Sequence[int], ranks: Sequence[int], live: Sequence[Sequence[int]]
) -> list[float]:
    """Bytes of every rank, counted one by one."""
    bounds = list(pairwise([-1, *chosen, len(line.work) - 1]))
    held = []
    for rank in sorted(set(ranks)):
        mine = {k: range(a + 1, b + 1) for k, (a, b) in enumerate(bounds) if ranks[k] == rank}
        every = [i for one in mine.values() for i in one]
        flying = max(
            sum(moment[k] * line.levels[0].saved[i] for k in mine for i in mine[k]) for moment in live
        )
        shared = sum(nbytes for nbytes, readers in line.shared if set(readers) & set(every))
        held.append(sum(line.kept[i] for i in every) + flying + shared)
    return held


@settings(max_examples=80, deadline=None)
@given(lines(), st.sampled_from([[0, 1], [0, 1, 2], [0, 1, 0, 1], [0, 1, 1, 0]]), st.data())
def test_memory_against_all_ways(line: Line, ranks: list[int], data: st.DataObject) -> None:
    """What fits is found wherever anything does, and the least that the fullest rank can hold is told."""
    sizes = st.sampled_from([0.0, 1.0, 4.0])
    kept, saved = ([data.draw(sizes) for _ in line.work] for _ in range(2))
    shared = [(3.0, (0, len(line.work) - 1)), (2.0, (1, 2))]
    line = Line(line.work, line.points, line.values, kept, [Level(saved, [0.0] * len(saved))], shared)
    live = [
        [data.draw(st.integers(0, 3)) * (rank == one) for rank in ranks]
        for one in set(ranks)
        for _ in range(2)
    ]
    ways = list(combinations(line.points, len(ranks) - 1))
    if not ways:
        return
    least = min(max(held_of(line, one, ranks, live)) for one in ways)
    assert least_memory(line, ranks, live) == pytest.approx(least)
    assert place(line, ranks, live, memory=least - 0.5) is None
    memory = least + data.draw(st.sampled_from([0.0, 2.0]))
    found = place(line, ranks, live, memory)
    assert found is not None and list(found.held) == pytest.approx(held_of(line, found.chosen, ranks, live))
    assert evaluate(line, ranks, found.chosen, live) == found
    fits = [one for one in ways if max(held_of(line, one, ranks, live)) <= memory]
    if len(set(ranks)) == len(ranks):
        assert max(found.loads) == pytest.approx(min(max(stages_of(line, one)) for one in fits))
    else:
        assert score(stages_of(line, found.chosen), ranks) == pytest.approx(
            min(score(stages_of(line, one), ranks) for one in fits)
        )


SCHEDULES = [
    ("1f1b", 3, 1),
    ("gpipe", 3, 1),
    ("interleaved", 2, 2),
    ("looped_bfs", 2, 2),
    ("zb_h1", 3, 1),
    ("zbv", 2, 2),
]


@pytest.mark.parametrize(("name", "p", "v"), SCHEDULES)
def test_the_cut_against_the_best_simulated_one(name: str, p: int, v: int) -> None:
    """All ways to cut layers of one size between an embedding and a head, simulated; lines of any work in the mean."""
    orders = build_orders(name, p, v, 8)
    ranks, finish = ranks_of_stages(orders), makespan_of(orders)
    assert finish is not None
    nothing = [0.0] * (p * v)
    ratios = []
    for seed in range(8):
        draw = random.Random(seed)
        size = draw.randint(p * v + 1, p * v + 3)
        layers = (
            [1.0] * (size - 2)
            if seed % 2
            else [draw.choice([0.5, 1.0, 1.0, 2.0, 4.0]) for _ in range(size - 2)]
        )
        line = Line([draw.choice([0.1, 0.3]), *layers, draw.choice([0.5, 2.0, 4.0])], range(size - 1))
        ways = combinations(line.points, p * v - 1)
        best = min(finish(stages_of(line, chosen), nothing) for chosen in ways)
        found = place(line, ranks, makespan_of=finish)
        assert found is not None and found.makespan == pytest.approx(
            finish(stages_of(line, found.chosen), nothing)
        )
        ratios.append(found.makespan / best)
        assert ratios[-1] <= (1.02 if seed % 2 else 1.2), seed
    assert sum(ratios) / len(ratios) <= 1.03


def test_large() -> None:
    """SC'21's 128 layers over 64 ranks with two chunks each: one layer a stage, nothing to choose."""
    line = Line([0.1, *[1.0] * 128, 0.5], range(129), [Value(i, (i + 1,), 0.01) for i in range(129)])
    found = place(line, [k % 64 for k in range(128)])
    assert found is not None and max(stages_of(line, found.chosen)) < 2.6 and max(found.loads) < 3.7
