"""Random slips in random schedules: a PlanError, or still a schedule that keeps every dependency, as checked here anew."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from autoptd.errors import PlanError
from autoptd.ir.actions import RECVS, SCHEDULES, SENDS, Action, Kind, Orders
from autoptd.schedule import Link, Simulation, add_transfers, build_orders, simulate
from autoptd.schedule.check import find_faults


@st.composite
def schedules(draw: st.DrawFn) -> tuple[Orders, list[Link]]:
    """A sound schedule, with or without transfers, and its links: a chain and some skips."""
    name = draw(st.sampled_from(list(SCHEDULES)))
    p, v = draw(st.integers(1, 3)), SCHEDULES[name] or draw(st.integers(1, 3))
    m = draw(st.integers(1, 2)) * p
    stages = st.integers(0, p * v - 1)
    skips = draw(st.lists(st.tuples(stages, stages, st.booleans()), max_size=2))
    links = [(stage, stage + 1, True) for stage in range(p * v - 1)]
    links += [(min(one, two), max(one, two), grad) for one, two, grad in skips if one != two]
    orders = build_orders(name, p, v, m)
    return (add_transfers(orders, links) if draw(st.booleans()) else orders), links


@st.composite
def slips(draw: st.DrawFn) -> tuple[Orders, list[Link]]:
    """The same with one to three slips."""
    orders, links = draw(schedules())
    for _ in range(draw(st.integers(1, 3))):
        rank = draw(st.integers(0, len(orders) - 1))
        order = orders[rank]
        if not order:
            continue
        i, j = draw(st.integers(0, len(order) - 1)), draw(st.integers(0, len(order) - 1))
        what = draw(st.sampled_from(["swap", "neighbours", "drop", "double", "move", "change"]))
        if what == "swap":
            order[i], order[j] = order[j], order[i]
        elif what == "neighbours":
            order[i - 1], order[i] = order[i], order[i - 1]
        elif what == "drop":
            del order[i]
        elif what == "double":
            order.insert(j, order[i])
        elif what == "move":
            orders[draw(st.integers(0, len(orders) - 1))].insert(0, order.pop(i))
        else:
            changes = [{"microbatch": order[j].microbatch + 1}, {"stage": order[j].stage}, {"peer": j - 1}]
            order[i] = order[i]._replace(**draw(st.sampled_from(changes)))
    return orders, links


@settings(max_examples=60, deadline=None)
@given(schedules())
def test_a_sound_schedule_keeps_every_dependency(case: tuple[Orders, list[Link]]) -> None:
    orders, links = case
    check_dependencies(orders, links, simulate(orders, links=links, link=0.25))


@settings(max_examples=400, deadline=None)
@given(slips())
def test_no_slip_passes_silently(case: tuple[Orders, list[Link]]) -> None:
    orders, links = case
    try:
        result = simulate(orders, links=links, link=0.25)
    except PlanError as error:
        assert error.fact
        return
    assert find_faults(orders, links) == []
    check_dependencies(orders, links, result)


def check_dependencies(orders: Orders, links: list[Link], result: Simulation) -> None:
    """What training needs, said without any code of the schedules."""
    home = {
        action.stage: rank for rank, order in enumerate(orders) for action in order if action.kind is Kind.F
    }
    counts = Counter(action for order in orders for action in order)
    assert set(counts.values()) == {1}
    stages, microbatches = range(1 + max(home)), range(1 + max(action.microbatch for action in counts))
    kinds = [Kind.F, Kind.B] + [Kind.W] * any(action.kind is Kind.W for action in counts)
    done = {Action(kind, stage, j) for kind in kinds for stage in stages for j in microbatches}
    assert {action for action in counts if action.kind in kinds} == done

    start = {action: begin for row in result.spans for action, begin, _ in row}
    end = {action: finish for row in result.spans for action, _, finish in row}
    assert set(start) == done
    grads = {(source, target) for source, target, grad in links if grad}
    for j in microbatches:
        for stage in stages:
            assert end[Action(Kind.F, stage, j)] <= start[Action(Kind.B, stage, j)]
            assert Kind.W not in kinds or end[Action(Kind.B, stage, j)] <= start[Action(Kind.W, stage, j)]
        for source, target, _ in links:
            travel = 0.25 if home[source] != home[target] else 0
            assert end[Action(Kind.F, source, j)] + travel <= start[Action(Kind.F, target, j)]
            if (source, target) in grads:
                assert end[Action(Kind.B, target, j)] + travel <= start[Action(Kind.B, source, j)]
    for row in result.spans:
        assert all(before[2] <= after[1] for before, after in pairwise(row))
    if any(action.kind in SENDS for action in counts):
        check_messages(orders, links, home, len(microbatches))


def check_messages(orders: Orders, links: list[Link], home: dict[int, int], m: int) -> None:
    """Every value and gradient of a link between ranks is sent after it is made and posted before it is used, once."""
    wanted = set()
    for source, target, grad in links:
        for j in range(m) if home[source] != home[target] else ():
            wanted |= {Action(Kind.SEND_F, source, j, target), Action(Kind.RECV_F, target, j, source)}
            wanted |= (
                {Action(Kind.SEND_B, target, j, source), Action(Kind.RECV_B, source, j, target)}
                if grad
                else set()
            )
    assert {action for order in orders for action in order if action.kind in (*SENDS, *RECVS)} == wanted
    for order in orders:
        at = {action: index for index, action in enumerate(order)}
        for action, index in at.items():
            if action.kind in (*SENDS, *RECVS):
                kind = Kind.F if action.kind in (Kind.SEND_F, Kind.RECV_F) else Kind.B
                compute = at[Action(kind, action.stage, action.microbatch)]
                assert compute < index if action.kind in SENDS else index < compute
            if action.kind is Kind.REDUCE:
                assert all(
                    i < index
                    for one, i in at.items()
                    if one.stage == action.stage and one.kind in (Kind.B, Kind.W)
                )
