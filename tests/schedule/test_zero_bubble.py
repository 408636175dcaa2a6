"""Zero-bubble orders: complete, within their memory, and as idle as their papers say."""

from __future__ import annotations

from collections import Counter

import pytest

from autoptd.ir.actions import Action, Kind, format_orders, ranks_of_stages
from autoptd.schedule import build_orders, one_f_one_b, simulate, zb_2p, zb_h1

UNIT = {
    "forward": 1,
    "backward": 2,
    "weight_gradient": 1,
}  # of which W takes one, so that F, B and W take one each
NAMES = ["zb_h1", "zb_2p", "zbv"]
GRID = [(name, p, m) for name in NAMES for p in range(1, 7) for m in (1, 2, 3, 5, 8, 12)]


def build(name: str, p: int, m: int) -> list[list[Action]]:
    return build_orders(name, p, 2 if name == "zbv" else 1, m)


def test_golden_zb_h1() -> None:
    assert format_orders(zb_h1(p=2, m=3)) == (
        "F0.0 F0.1 B0.0 W0.0 F0.2 B0.1 W0.1 B0.2 W0.2\nF1.0 B1.0 F1.1 B1.1 W1.0 F1.2 B1.2 W1.1 W1.2\n"
    )


@pytest.mark.parametrize(("name", "p", "m"), GRID)
def test_every_stage_does_every_microbatch_once(name: str, p: int, m: int) -> None:
    orders = build(name, p, m)
    ranks = ranks_of_stages(orders)
    assert ranks == (*range(p), *reversed(range(p))) if name == "zbv" else tuple(range(p))
    for rank, order in enumerate(orders):
        stages = [stage for stage, home in enumerate(ranks) if home == rank]
        assert Counter(order) == Counter(
            Action(kind, stage, j) for kind in (Kind.F, Kind.B, Kind.W) for stage in stages for j in range(m)
        )


@pytest.mark.parametrize(("name", "p", "m"), GRID)
def test_memory_is_bounded(name: str, p: int, m: int) -> None:
    most = {"zb_h1": p, "zb_2p": 2 * p - 1, "zbv": 2 * p}[name]  # zbv's stages are half as large
    assert max(simulate(build(name, p, m), **UNIT).peak_live) == min(most, m * (1 + (name == "zbv")))


@pytest.mark.parametrize("p", [2, 3, 4, 6, 8])
@pytest.mark.parametrize("name", NAMES)
def test_idle_is_a_third_of_that_of_1f1b(name: str, p: int) -> None:
    for m in (2 * p, 4 * p):
        of_1f1b = simulate(one_f_one_b(p, m), forward=1, backward=2)
        result = simulate(build(name, p, m), **UNIT)
        work = 3 * m * (1 + (name == "zbv"))
        assert of_1f1b.makespan == 3 * m + 3 * (p - 1)
        assert result.makespan == work + (p - 1)


@pytest.mark.parametrize("p", [2, 4, 7])
def test_no_rank_of_zb_2p_waits_between_its_first_action_and_its_last(p: int) -> None:
    for row in simulate(zb_2p(p, 3 * p), **UNIT).spans:
        assert row[-1][2] - row[0][1] == len(row)
