"""Microbatches in flight per stage: the numbers of the papers, and never fewer than any moment of the run."""

from __future__ import annotations

import pytest

from autoptd.ir.actions import Kind
from autoptd.schedule import build_orders, delay_weight_gradients, gpipe, in_flight_moments, one_f_one_b


def test_one_stage_per_rank() -> None:
    assert in_flight_moments(one_f_one_b(p=3, m=8)) == [(3, 0, 0), (0, 2, 0), (0, 0, 1)]
    assert in_flight_moments(one_f_one_b(p=3, m=2)) == [(2, 0, 0), (0, 2, 0), (0, 0, 1)]
    assert in_flight_moments(gpipe(p=2, m=5)) == [(5, 0), (0, 5)]


def test_what_waits_for_its_weight_gradients_is_live() -> None:
    orders = delay_weight_gradients(one_f_one_b(p=2, m=4), "before_reduce")
    assert in_flight_moments(orders) == [(4, 0), (0, 4)]


@pytest.mark.parametrize(("p", "v", "m"), [(2, 2, 4), (4, 2, 8), (3, 3, 6)])
def test_several_chunks(p: int, v: int, m: int) -> None:
    orders = build_orders("interleaved", p, v, m)
    moments = in_flight_moments(orders)
    assert max(map(sum, moments)) == min(
        m * v, 2 * (p - 1) + (v - 1) * p + 1
    )  # rank 0: its warm-up and one more
    for rank, order in enumerate(orders):
        live = [0] * (p * v)
        for action in order:
            live[action.stage] += (action.kind is Kind.F) - (action.kind is Kind.B)
            assert any(all(a >= b for a, b in zip(one, live, strict=True)) for one in moments), (rank, action)
