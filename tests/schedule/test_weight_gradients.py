"""W actions: where they stand, that every consumer of orders knows them, and what the simulation says about them."""

from __future__ import annotations

import pytest

from autoptd.errors import PlanError
from autoptd.ir.actions import Action, Kind, Orders, format_orders, parse_orders
from autoptd.options import DELAYS
from autoptd.schedule import add_transfers, build_orders, delay_weight_gradients, gpipe, simulate

SCHEDULES = [("gpipe", 2, 1, 3), ("1f1b", 3, 1, 4), ("interleaved", 2, 2, 4)]


def links(stages: int) -> list[tuple[int, int, bool]]:
    return [(stage, stage + 1, True) for stage in range(stages - 1)]


def test_golden_placements() -> None:
    assert format_orders(delay_weight_gradients(gpipe(1, 2), "after_b")) == "F0.0 F0.1 B0.0 W0.0 B0.1 W0.1\n"
    assert (
        format_orders(delay_weight_gradients(gpipe(1, 2), "before_reduce"))
        == "F0.0 F0.1 B0.0 B0.1 W0.0 W0.1\n"
    )
    with pytest.raises(ValueError, match="delay 'later'"):
        delay_weight_gradients(gpipe(1, 2), "later")


@pytest.mark.parametrize("delay", DELAYS)
@pytest.mark.parametrize(("name", "p", "v", "m"), SCHEDULES)
def test_every_backward_has_its_w_before_the_reduce(name: str, p: int, v: int, m: int, delay: str) -> None:
    plain = build_orders(name, p, v, m)
    orders = add_transfers(delay_weight_gradients(plain, delay), links(p * v))
    simulate(orders, links=links(p * v))
    for before, order in zip(plain, orders, strict=True):
        assert [action for action in order if action.kind in (Kind.F, Kind.B)] == before
        at = {action: i for i, action in enumerate(order)}
        for backward in [action for action in order if action.kind is Kind.B]:
            w = Action(Kind.W, backward.stage, backward.microbatch)
            assert at[backward] < at[w] < at[Action(Kind.REDUCE, backward.stage)]
            sends = [
                one
                for one in order
                if one.kind is Kind.SEND_B and (one.stage, one.microbatch) == (w.stage, w.microbatch)
            ]
            assert all(
                at[backward] < at[send] < at[w] for send in sends
            )  # nobody waits for a weight gradient


@pytest.mark.parametrize(("name", "p", "v", "m"), SCHEDULES)
def test_w_behind_b_keeps_the_work_and_lets_the_next_rank_go_on(name: str, p: int, v: int, m: int) -> None:
    plain = build_orders(name, p, v, m)
    before, after = simulate(plain), simulate(delay_weight_gradients(plain, "after_b"))
    busy = [[sum(end - start for _, start, end in row) for row in run.spans] for run in (before, after)]
    assert busy[0] == busy[1]
    assert after.makespan < before.makespan
    assert after.peak_live == before.peak_live


def test_live_until_w() -> None:
    orders = delay_weight_gradients(build_orders("1f1b", 2, 1, 4), "before_reduce")
    assert simulate(orders).peak_live == (4, 4)


@pytest.mark.parametrize(("weight_gradient", "fits"), [(0.5, True), (2.0, False)])
def test_a_w_takes_its_part_of_the_backward(weight_gradient: float, fits: bool) -> None:
    orders = delay_weight_gradients(gpipe(1, 1), "after_b")
    if fits:
        spans = simulate(orders, weight_gradient=weight_gradient).spans[0]
        assert [(str(action), end - start) for action, start, end in spans] == [
            ("F0.0", 1),
            ("B0.0", 1.5),
            ("W0.0", 0.5),
        ]
    else:
        with pytest.raises(ValueError, match="positive"):
            simulate(orders, weight_gradient=weight_gradient)


FAULTS = {
    "F0.0 F0.1 B0.0 W0.0 B0.1": "W0.1 is missing",
    "F0.0 W0.0 B0.0": "W0.0 comes before B0.0",
    "F0.0 B0.0 W0.0 W0.0": "W0.0 appears twice",
    "F0.0 B0.0 REDUCE0 W0.0": "REDUCE0 comes before W0.0",
}


@pytest.mark.parametrize("text", FAULTS)
def test_what_is_wrong_with_a_w_is_said(text: str) -> None:
    orders: Orders = parse_orders(text)
    with pytest.raises(PlanError, match=FAULTS[text]):
        simulate(orders)
