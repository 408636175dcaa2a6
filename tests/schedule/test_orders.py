"""Orders against the printed example, against torch.distributed.pipelining as an oracle, and by their properties."""

from collections import Counter
from types import SimpleNamespace

import pytest
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
)

from autoptd.errors import PlanError
from autoptd.ir.actions import SCHEDULES, ZERO_BUBBLE, Action, Kind, Orders, format_orders, parse_orders
from autoptd.schedule import add_transfers, build_orders, gpipe, interleaved, one_f_one_b, simulate

GRID = [(name, p, 1, m) for name in ("gpipe", "1f1b") for p in (1, 2, 3, 4, 8) for m in (1, 2, 5, 8)] + [
    ("interleaved", p, v, rounds * p) for p in (1, 2, 3, 4) for v in (1, 2, 3) for rounds in (1, 2, 5)
]
GRID += [
    ("interleaved", p, v, m)
    for p, m in ((2, 1), (4, 3), (2, 3), (3, 5), (4, 7), (4, 10), (3, 8))
    for v in (1, 2, 3)
]
GRID += [("looped_bfs", p, v, m) for p in (1, 2, 3, 4) for v in (1, 2, 3) for m in (1, 2, 5, 8)]


def test_golden_interleaved():
    golden = """
    F0.0 F0.1 F2.0 F2.1 F0.2 B2.0 F0.3 B2.1 F2.2 B0.0 F2.3 B0.1 B2.2 B2.3 B0.2 B0.3
    F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 F1.2 B1.0 F1.3 B1.1 F3.2 B3.2 F3.3 B3.3 B1.2 B1.3
    """
    assert interleaved(p=2, v=2, m=4) == parse_orders(golden)


def test_golden_one_f_one_b():
    assert (
        format_orders(one_f_one_b(p=2, m=3))
        == "F0.0 F0.1 B0.0 F0.2 B0.1 B0.2\nF1.0 B1.0 F1.1 B1.1 F1.2 B1.2\n"
    )


def test_golden_gpipe():
    assert format_orders(gpipe(p=2, m=2)) == "F0.0 F0.1 B0.0 B0.1\nF1.0 F1.1 B1.0 B1.1\n"


@pytest.mark.parametrize(("name", "p", "v", "m"), GRID)
def test_every_stage_does_every_microbatch_once(name: str, p: int, v: int, m: int):
    orders = build_orders(name, p, v, m)
    assert len(orders) == p
    for rank, order in enumerate(orders):
        wanted = Counter(
            Action(kind, chunk * p + rank, j)
            for kind in (Kind.F, Kind.B)
            for chunk in range(v)
            for j in range(m)
        )
        assert Counter(order) == wanted
        for action in order:
            if action.kind is Kind.B:
                assert order.index(Action(Kind.F, action.stage, action.microbatch)) < order.index(action)


@pytest.mark.parametrize(("name", "p", "v", "m"), GRID)
def test_orders_are_those_of_torch(name: str, p: int, v: int, m: int):
    if name == "1f1b" and m < p:
        pytest.skip("torch refuses fewer microbatches than stages")
    ranks = p - 1 if name == "1f1b" else p  # torch's listing of 1F1B numbers the last rank's forwards from 1
    assert build_orders(name, p, v, m)[:ranks] == torch_orders(name, p, v, m)[:ranks]


def torch_orders(name: str, p: int, v: int, m: int) -> Orders:
    """What torch's schedule classes would run; their stages are stubs, as no process group is needed for a listing."""
    if name in ("interleaved", "looped_bfs"):
        stages = [stub_stage(stage, p, v) for stage in range(0, p * v, p)]
        made = {"interleaved": ScheduleInterleaved1F1B, "looped_bfs": ScheduleLoopedBFS}[name](stages, m)
        listing = made.pipeline_order
    else:
        schedule = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[name](stub_stage(0, p, 1), m)
        listing = getattr(schedule, "pipeline_order", None)
        if listing is None:
            pytest.skip("this torch lists no order for single-stage schedules")
    kinds = {"F": Kind.F, "B": Kind.B}
    return [
        [
            Action(kinds[one.computation_type.value], one.stage_index, one.microbatch_index)
            for one in listing[rank]
            if one is not None and one.computation_type.value in kinds
        ]
        for rank in range(p)
    ]


def stub_stage(index: int, p: int, v: int) -> SimpleNamespace:
    return SimpleNamespace(
        stage_index=index,
        num_stages=p * v,
        group_size=p,
        group_rank=index % p,
        is_first=index == 0,
        is_last=index == p * v - 1,
        has_backward=True,
    )


def test_golden_interleaved_in_uneven_groups():
    golden = """
    F0.0 F0.1 F0.2 F2.0 F2.1 F2.2 B2.0 F0.3 B2.1 F0.4 B2.2 F2.3 B0.0 F2.4 B0.1 B0.2 B2.3 B2.4 B0.3 B0.4
    F1.0 F1.1 F1.2 F3.0 B3.0 F3.1 B3.1 F3.2 B3.2 F1.3 B1.0 F1.4 B1.1 F3.3 B1.2 F3.4 B3.3 B3.4 B1.3 B1.4
    """
    assert interleaved(p=2, v=2, m=5) == parse_orders(golden)


@pytest.mark.parametrize("p", range(1, 7))
@pytest.mark.parametrize("v", range(1, 5))
def test_every_schedule_runs_for_any_count_of_microbatches(p: int, v: int):
    """With its transfers, to its end; 1F1B alike and looped schedules with no more bubble than the formula says."""
    links = [(stage, stage + 1, True) for stage in range(p * v - 1)]
    for name in [name for name, chunks in SCHEDULES.items() if chunks in (0, v)]:
        for m in range(1, 13):
            result = simulate(add_transfers(build_orders(name, p, v, m), links), links=links)
            if m >= p and name not in ZERO_BUBBLE:
                assert result.bubble == (p - 1) / (v * m)
            if name == "interleaved":
                group = m // max(1, m // p) + (m % max(1, m // p) > 0)
                warmups = [2 * (p - 1 - rank) + (v - 1) * group for rank in range(p)]
                assert result.peak_live == tuple(min(v * m, warmup + 1) for warmup in warmups)


def test_build_orders_knows_every_schedule_and_no_other():
    assert build_orders("1f1b", 2, 1, 3) == one_f_one_b(2, 3)
    for name, chunks in SCHEDULES.items():
        assert build_orders(name, 2, chunks or 3, 4)
    with pytest.raises(PlanError, match="no such schedule"):
        build_orders("zb", 2, 1, 4)
    for name in ("gpipe", "1f1b", "zb_h1", "zb_2p"):
        with pytest.raises(PlanError, match="runs 1 model chunk per pipeline rank") as caught:
            build_orders(name, 2, 2, 4)
        assert caught.value.remedy == "v=1, or a schedule in {interleaved, looped_bfs, zbv}"
    with pytest.raises(PlanError, match="'zbv' runs 2 model chunks per pipeline rank"):
        build_orders("zbv", 2, 1, 4)
