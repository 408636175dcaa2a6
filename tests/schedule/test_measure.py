"""What a simulation says of a schedule besides its finish: exact bubbles, waits, live microbatches, bytes over time."""

from __future__ import annotations

from fractions import Fraction

import pytest

from autoptd.ir.actions import COMPUTES, Kind
from autoptd.schedule import Simulation, add_transfers, build_orders, gpipe, one_f_one_b, simulate, zb_h1

GRID = [
    ("gpipe", 1),
    ("1f1b", 1),
    ("interleaved", 1),
    ("interleaved", 2),
    ("interleaved", 3),
    ("looped_bfs", 3),
]


@pytest.mark.parametrize("p", [2, 3, 4, 7])
@pytest.mark.parametrize(("name", "v"), GRID)
def test_uniform_stages_have_exactly_the_bubble_of_the_formula(name: str, v: int, p: int) -> None:
    for m in (p, 3 * p):
        orders = build_orders(name, p, v, m)
        assert simulate(orders).bubble == (p - 1) / (v * m)
        exact = simulate(orders, forward=Fraction(1, 3), backward=Fraction(5, 7)).bubble
        assert exact == Fraction(p - 1, v * m) and isinstance(exact, Fraction)


def test_idle_is_before_between_and_after() -> None:
    result = simulate(one_f_one_b(p=2, m=2))
    assert result.idle == (((2, 4), (6, 7)), ((0, 1), (7, 9)))
    assert result.busy == (6, 6)


@pytest.mark.parametrize(("name", "v"), [*GRID, ("zb_h1", 1), ("zb_2p", 1), ("zbv", 2)])
def test_idle_and_busy_make_the_whole_time(name: str, v: int) -> None:
    result = simulate(build_orders(name, 3, v, 6), forward=[1, 2, 1] * v, backward=[3, 5, 3] * v)
    for gaps, busy in zip(result.idle, result.busy, strict=True):
        assert sum(end - start for start, end in gaps) + busy == result.makespan


def test_a_forward_keeps_its_bytes_until_its_backward_ends() -> None:
    memory = simulate(gpipe(p=1, m=2)).memory(activation_bytes=100)
    assert memory.curves == (((0, 100), (1, 200), (4, 100), (6, 0)),)
    assert memory.peaks == (200,)


def test_a_part_may_stay_until_w() -> None:
    result = simulate(zb_h1(p=1, m=1))  # F0.0 to 1, B0.0 to 2, W0.0 to 3
    assert result.memory(100).curves == (((0, 100), (3, 0)),)
    assert result.memory(100, until_w=30).curves == (((0, 100), (2, 30), (3, 0)),)


def test_bytes_per_stage() -> None:
    result = simulate(build_orders("interleaved", 2, 2, 2))
    assert result.memory([1, 10, 100, 1000]).peaks == (2 + 200, 20 + 1000 + 0)
    assert result.memory(1).peaks == result.peak_live
    with pytest.raises(ValueError, match="there are 4 stages"):
        result.memory([1, 2])


def test_links_may_differ() -> None:
    orders = one_f_one_b(p=3, m=1)
    links = [(0, 1, True), (1, 2, True)]
    for simulated in (orders, add_transfers(orders, links)):
        assert simulate(simulated, link={(0, 1): 1, (1, 2): 10}).makespan == 9 + 2 * 11
        assert simulate(simulated, link={(0, 1): 1, (1, 2): 10, (2, 1): 0}).makespan == 9 + 12
        assert simulate(simulated, link=lambda sender, receiver: 5 * (receiver > sender)).makespan == 9 + 10
        with pytest.raises(ValueError, match="is negative"):
            simulate(simulated, link=-1)


@pytest.mark.parametrize("transfers", [False, True])
def test_spans_are_the_computations_in_order(transfers: bool) -> None:
    orders = build_orders("zbv", 3, 2, 4)
    if transfers:
        orders = add_transfers(orders, [(stage, stage + 1, True) for stage in range(5)])
    result: Simulation = simulate(orders)
    for order, row in zip(orders, result.spans, strict=True):
        assert [action for action, _, _ in row] == [action for action in order if action.kind in COMPUTES]
        assert all(end - start == 1 for action, start, end in row if action.kind is Kind.W)
