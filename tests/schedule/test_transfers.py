from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoptd.errors import InternalError
from autoptd.ir.actions import RECVS, SENDS, Action, Kind, Orders, format_orders, parse_orders
from autoptd.schedule import Link, add_transfers, build_orders, gpipe, one_f_one_b, simulate
from autoptd.schedule.transfers import partner


def chain(num_stages: int) -> list[Link]:
    return [(stage, stage + 1, True) for stage in range(num_stages - 1)]


@st.composite
def cases(draw: st.DrawFn) -> tuple[Orders, int, list[Link]]:
    """Any schedule with a chain and some skips, several of which may lose their gradient or be named twice."""
    p, v, rounds = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    name = "interleaved" if v > 1 else draw(st.sampled_from(["gpipe", "1f1b", "interleaved"]))
    stages = st.integers(0, p * v - 1)
    skips = draw(st.lists(st.tuples(stages, stages, st.booleans()), max_size=6))
    links = chain(p * v) + [(min(one, two), max(one, two), grad) for one, two, grad in skips if one != two]
    return build_orders(name, p, v, rounds * p), p, links


def test_golden_two_ranks():
    assert format_orders(add_transfers(one_f_one_b(p=2, m=2), [(0, 1, True)])) == (
        "F0.0 SEND_F0.0>1 RECV_B0.0<1 F0.1 SEND_F0.1>1 RECV_B0.1<1 B0.0 B0.1 REDUCE0\n"
        "RECV_F1.0<0 F1.0 RECV_F1.1<0 B1.0 SEND_B1.0>0 F1.1 B1.1 SEND_B1.1>0 REDUCE1\n"
    )


def test_golden_skip_without_gradient():
    orders = add_transfers(gpipe(p=3, m=1), [(0, 1, True), (1, 2, True), (0, 2, False)])
    assert orders == parse_orders("""
        RECV_B0.0<1 F0.0 SEND_F0.0>1 SEND_F0.0>2 B0.0 REDUCE0
        RECV_F1.0<0 RECV_B1.0<2 F1.0 SEND_F1.0>2 B1.0 SEND_B1.0>0 REDUCE1
        RECV_F2.0<0 RECV_F2.0<1 F2.0 B2.0 SEND_B2.0>1 REDUCE2
    """)


@settings(max_examples=60, deadline=None)
@given(cases())
def test_any_schedule_with_any_links_runs_to_its_end(case: tuple[Orders, int, list[Link]]):
    orders, _, links = case
    full = add_transfers(orders, links)
    assert [[action for action in order if action.kind in (Kind.F, Kind.B)] for order in full] == orders
    simulate(full, link=0.3, links=links)


@settings(max_examples=60, deadline=None)
@given(cases())
def test_receives_are_posted_in_the_order_of_the_sends(case: tuple[Orders, int, list[Link]]):
    orders, p, links = case
    sends: dict[tuple[int, int], list[Action]] = defaultdict(list)
    posts: dict[tuple[int, int], list[Action]] = defaultdict(list)
    for rank, order in enumerate(add_transfers(orders, links)):
        for action in order:
            if action.kind in SENDS:
                sends[rank, action.peer % p].append(partner(action))
            if action.kind in RECVS:
                posts[action.peer % p, rank].append(action)
    assert sends == posts


def test_a_receive_is_posted_one_computation_ahead():
    for order in add_transfers(one_f_one_b(p=4, m=8), chain(4))[1:3]:
        for index, action in enumerate(order):
            if action.kind in RECVS and index:
                needing = Action(Kind.F if action.kind is Kind.RECV_F else Kind.B, action.stage, action.microbatch)
                between = [one for one in order[index : order.index(needing)] if one.kind in (Kind.F, Kind.B)]
                assert len(between) == 1


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
    with pytest.raises(InternalError, match="later stages only"):
        add_transfers(gpipe(p=3, m=1), [link])
