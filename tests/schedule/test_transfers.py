from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoptd.errors import InternalError, PlanError
from autoptd.ir.actions import (
    COMPUTES,
    RECVS,
    SCHEDULES,
    SENDS,
    Action,
    Kind,
    Orders,
    format_orders,
    parse,
    parse_orders,
    ranks_of_stages,
)
from autoptd.schedule import Link, add_transfers, build_orders, gpipe, one_f_one_b, simulate
from autoptd.schedule.wiring import PARTNER, partner


def chain(num_stages: int) -> list[Link]:
    return [(stage, stage + 1, True) for stage in range(num_stages - 1)]


@st.composite
def cases(draw: st.DrawFn) -> tuple[Orders, int, list[Link]]:
    """Any schedule with a chain and some skips, several of which may lose their gradient or be named twice."""
    name = draw(st.sampled_from(list(SCHEDULES)))
    p, v, rounds = (
        draw(st.integers(1, 4)),
        SCHEDULES[name] or draw(st.integers(1, 3)),
        draw(st.integers(1, 3)),
    )
    stages = st.integers(0, p * v - 1)
    skips = draw(st.lists(st.tuples(stages, stages, st.booleans()), max_size=6))
    links = chain(p * v) + [(min(one, two), max(one, two), grad) for one, two, grad in skips if one != two]
    return build_orders(name, p, v, rounds * p), p, links


def test_golden_two_ranks():
    assert format_orders(add_transfers(one_f_one_b(p=2, m=2), [(0, 1, True)])) == (
        "F0.0 SEND_F0.0>1 F0.1 SEND_F0.1>1 RECV_B0.0<1 B0.0 RECV_B0.1<1 B0.1 REDUCE0\n"
        "RECV_F1.0<0 RECV_F1.1<0 F1.0 B1.0 SEND_B1.0>0 F1.1 B1.1 SEND_B1.1>0 REDUCE1\n"
    )


def test_golden_skip_without_gradient():
    orders = add_transfers(gpipe(p=3, m=1), [(0, 1, True), (1, 2, True), (0, 2, False)])
    assert orders == parse_orders("""
        F0.0 SEND_F0.0>1 SEND_F0.0>2 RECV_B0.0<1 B0.0 REDUCE0
        RECV_F1.0<0 F1.0 SEND_F1.0>2 RECV_B1.0<2 B1.0 SEND_B1.0>0 REDUCE1
        RECV_F2.0<0 RECV_F2.0<1 F2.0 B2.0 SEND_B2.0>1 REDUCE2
    """)


@settings(max_examples=60, deadline=None)
@given(cases())
def test_any_schedule_with_any_links_runs_to_its_end(case: tuple[Orders, int, list[Link]]):
    orders, _, links = case
    full = add_transfers(orders, links)
    assert [[action for action in order if action.kind in COMPUTES] for order in full] == orders
    simulate(full, link=0.3, links=links)


@settings(max_examples=100, deadline=None)
@given(cases())
def test_each_rank_may_end_one_action_before_it_begins_the_next(case: tuple[Orders, int, list[Link]]):
    """What a device does that runs the kernels of all communicators in the order in which they were issued."""
    orders, _, links = case
    assert runs_one_by_one(add_transfers(orders, links))


def runs_one_by_one(orders: Orders) -> bool:
    """Whether the orders end if a SEND waits for its RECV to stand first on the other rank, and the other way round."""
    left = [list(order) for order in orders]
    moves = True
    while moves:
        moves = False
        for order in left:
            while order and order[0].kind not in PARTNER:
                moves = bool(order.pop(0))
            other = next((one for one in left if order and one and one[0] == partner(order[0])), None)
            if other is not None:
                order.pop(0), other.pop(0)
                moves = True
    return not any(left)


def test_one_computation_ahead_on_both_sides_is_refused():
    """Each rank posts a receive before it sends what the other, who does the same, is at: a deadlock on one device queue."""
    orders = parse_orders("""
        F0.0 SEND_F0.0>1 RECV_B0.0<1 F0.1 SEND_F0.1>1 RECV_B0.1<1 B0.0 B0.1 REDUCE0
        RECV_F1.0<0 F1.0 RECV_F1.1<0 B1.0 SEND_B1.0>0 F1.1 B1.1 SEND_B1.1>0 REDUCE1
    """)
    assert not runs_one_by_one(orders)
    with pytest.raises(PlanError) as caught:
        simulate(orders)
    assert caught.value.fact == (
        "messages cross: rank 0 issues RECV_B0.0<1 before SEND_F0.1>1, rank 1 issues RECV_F1.1<0 before SEND_B1.0>0; "
        "NCCL requires the same order on all ranks"
    )


def test_messages_that_cross_on_three_ranks_are_refused():
    orders = add_transfers(gpipe(p=3, m=1), [(0, 1, False), (1, 2, False), (0, 2, False)])
    first, second = orders[2].index(parse("RECV_F2.0<0")), orders[2].index(parse("RECV_F2.0<1"))
    orders[2][first], orders[2][second] = orders[2][second], orders[2][first]
    orders[0][1], orders[0][2] = orders[0][2], orders[0][1]  # now rank 0 sends to rank 2 first
    said = "rank 0 issues SEND_F0.0>2 before SEND_F0.0>1, rank 2 issues RECV_F2.0<1 before RECV_F2.0<0, rank 1 issues"
    with pytest.raises(PlanError, match=said):
        simulate(orders)


@settings(max_examples=60, deadline=None)
@given(cases())
def test_receives_are_posted_in_the_order_of_the_sends(case: tuple[Orders, int, list[Link]]):
    orders, _, links = case
    home = ranks_of_stages(orders)
    sends: dict[tuple[int, int], list[Action]] = defaultdict(list)
    posts: dict[tuple[int, int], list[Action]] = defaultdict(list)
    for rank, order in enumerate(add_transfers(orders, links)):
        for action in order:
            if action.kind in SENDS:
                sends[rank, home[action.peer]].append(partner(action))
            if action.kind in RECVS:
                posts[home[action.peer], rank].append(action)
    assert sends == posts


def test_a_receive_is_posted_before_the_computation_during_which_its_message_is_made():
    """Of two that end together the sender's is first; a message that is made between two computations is not waited for."""
    plain = one_f_one_b(p=4, m=8)
    spans = {action: (start, end) for row in simulate(plain).spans for action, start, end in row}
    ahead = set()
    for order in add_transfers(plain, chain(4)):
        for index, action in enumerate(order):
            if action.kind in RECVS:
                kind = Kind.F if action.kind is Kind.RECV_F else Kind.B
                made = spans[Action(kind, action.peer, action.microbatch)][1]
                computes = [one for one in order[index:] if one.kind in COMPUTES]
                before = [one for one in order[:index] if one.kind in COMPUTES]
                assert spans[computes[0]][1] >= made
                assert not before or spans[before[-1]][1] <= made
                ahead.add(computes.index(Action(kind, action.stage, action.microbatch)))
    assert ahead == {0, 1, 2}


def test_links_within_a_rank_need_no_transfer():
    links = [*chain(4), (0, 2, True), (1, 3, True)]
    orders = build_orders("interleaved", 2, 2, 4)
    assert add_transfers(orders, links) == add_transfers(orders, chain(4))
    one_rank = add_transfers(build_orders("1f1b", 1, 1, 2), [])
    assert format_orders(one_rank) == "F0.0 B0.0 F0.1 B0.1 REDUCE0\n"


def test_transfers_are_made_anew():
    once = add_transfers(one_f_one_b(p=3, m=4), chain(3))
    assert add_transfers(once, chain(3)) == once


@pytest.mark.parametrize("link", [(1, 1, True), (2, 1, False)])
def test_a_link_backwards_is_refused(link: Link):
    with pytest.raises(InternalError, match="flow to later stages"):
        add_transfers(gpipe(p=3, m=1), [link])
