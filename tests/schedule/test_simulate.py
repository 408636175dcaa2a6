import pytest

from autoptd.errors import PlanError
from autoptd.ir.actions import Action, Kind, Orders, parse, parse_orders
from autoptd.schedule import Link, add_transfers, build_orders, gpipe, interleaved, one_f_one_b, simulate


def chain(num_stages: int) -> list[Link]:
    return [(stage, stage + 1, True) for stage in range(num_stages - 1)]


def with_chain(orders: Orders, num_stages: int) -> Orders:
    return add_transfers(orders, chain(num_stages))


def fact_of(orders: Orders | str, links: list[Link] | None = None) -> str:
    """The fact of the PlanError that these orders raise."""
    with pytest.raises(PlanError) as caught:
        simulate(parse_orders(orders) if isinstance(orders, str) else orders, links=links)
    assert caught.value.site == "schedule"
    return caught.value.fact


# what it measures


@pytest.mark.parametrize("transfers", [False, True])
@pytest.mark.parametrize(("p", "m"), [(1, 1), (1, 3), (2, 1), (2, 4), (4, 2), (4, 8), (8, 8), (8, 32)])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_bubble_and_peak_of_one_chunk(name: str, p: int, m: int, transfers: bool):
    orders = build_orders(name, p, 1, m)
    result = simulate(with_chain(orders, p) if transfers else orders)
    assert result.bubble == pytest.approx((p - 1) / m, abs=1e-12)
    assert result.makespan == (m + p - 1) * 3
    assert result.peak_live == tuple(m if name == "gpipe" else min(m, p - rank) for rank in range(p))


@pytest.mark.parametrize("transfers", [False, True])
@pytest.mark.parametrize(
    ("p", "v", "m"), [(2, 2, 2), (2, 2, 4), (4, 2, 8), (4, 3, 12), (3, 4, 9), (8, 2, 32)]
)
def test_bubble_and_peak_of_interleaved(p: int, v: int, m: int, transfers: bool):
    orders = interleaved(p, v, m)
    result = simulate(with_chain(orders, p * v) if transfers else orders, forward=1.5, backward=2.5)
    assert result.bubble == pytest.approx((p - 1) / (v * m), abs=1e-12)
    warmups = [2 * (p - 1 - rank) + (v - 1) * p for rank in range(p)]
    assert result.peak_live == tuple(min(m * v, warmup + 1) for warmup in warmups)
    if m > p:
        assert result.peak_live[0] == v * p + p - 1


def test_spans_of_a_small_run():
    result = simulate(one_f_one_b(p=2, m=2))
    assert result.spans[0] == (
        (parse("F0.0"), 0.0, 1.0),
        (parse("F0.1"), 1.0, 2.0),
        (parse("B0.0"), 4.0, 6.0),
        (parse("B0.1"), 7.0, 9.0),
    )
    assert result.spans[1][0] == (parse("F1.0"), 1.0, 2.0)
    assert result.makespan == 9.0


def test_durations_per_stage_and_the_busiest_rank_as_ideal():
    result = simulate(gpipe(p=2, m=1), forward=[1.0, 4.0], backward=[2.0, 8.0])
    assert result.makespan == 15.0
    assert result.bubble == pytest.approx(15 / 12 - 1)


@pytest.mark.parametrize("transfers", [False, True])
def test_a_message_takes_its_time(transfers: bool):
    orders = one_f_one_b(p=2, m=1)
    assert simulate(with_chain(orders, 2) if transfers else orders, link=0.5).makespan == 6 + 2 * 0.5


def test_messages_of_a_channel_move_one_after_the_other():
    links = [(0, 1, False), (0, 3, False)]
    orders = parse_orders("F0.0 F2.0 B2.0 B0.0\nF1.0 F3.0 B3.0 B1.0")
    # both are sent at 1: 0>1 moves from 1 to 11, 0>3 from 11 to 21
    result = simulate(add_transfers(orders, links), link=10.0, links=links)
    assert result.spans[1][:2] == ((parse("F1.0"), 11.0, 12.0), (parse("F3.0"), 21.0, 22.0))


def test_a_late_post_delays_its_message():
    early = "F0.0 SEND_F0.0>1 F0.1 SEND_F0.1>1 B0.0 B0.1\nRECV_F1.0<0 RECV_F1.1<0 F1.0 B1.0 F1.1 B1.1"
    late = early.replace("RECV_F1.1<0 F1.0 B1.0", "F1.0 B1.0 RECV_F1.1<0")
    # rank 1 runs F1.0 and B1.0 from 2 to 5: the message of microbatch 1 moves meanwhile, or only after
    assert simulate(parse_orders(early), link=1.0).spans[1][2][1] == 5.0
    assert simulate(parse_orders(late), link=1.0).spans[1][2][1] == 6.0


def test_wrong_durations_are_refused():
    with pytest.raises(ValueError, match="each of 2 stages"):
        simulate(gpipe(p=2, m=1), forward=[1.0])


# what it finds: two ranks, one microbatch, one slip each

SOUND = """
F0.0 SEND_F0.0>1 RECV_B0.0<1 B0.0 REDUCE0
RECV_F1.0<0 F1.0 B1.0 SEND_B1.0>0 REDUCE1
"""
SLIPS = [
    ("REDUCE0", "B0.0 REDUCE0", "B0.0 appears twice: on rank 0 and on rank 0"),
    ("RECV_F1.0<0", "RECV_F1.0<0 F0.0", "rank 1: F0.0 belongs to rank 0"),
    (" F1.0 B1.0", " B1.0 F1.0", "rank 1: B1.0 comes before F1.0"),
    ("F1.0 B1.0", "F1.0", "rank 1: B1.0 is missing"),
    ("F0.0 SEND", "F2.0 B2.0 F0.0 SEND", "the stages are 0, 1, 2, not 0 .. 2*v-1"),
    ("REDUCE0", "F0.2 B0.2 REDUCE0", "the microbatches are 0, 2, not 0 .. m-1"),
    ("F0.0 SEND_F0.0>1", "SEND_F0.0>1 F0.0", "rank 0: SEND_F0.0>1 comes before F0.0"),
    ("B1.0 SEND_B1.0>0", "SEND_B1.0>0 B1.0", "rank 1: SEND_B1.0>0 comes before B1.0"),
    ("RECV_F1.0<0 F1.0", "F1.0 RECV_F1.0<0", "rank 1: F1.0 comes before RECV_F1.0<0"),
    ("RECV_B0.0<1 B0.0", "B0.0 RECV_B0.0<1", "rank 0: B0.0 comes before RECV_B0.0<1"),
    ("RECV_F1.0<0", "", "rank 1: F1.0 needs RECV_F1.0<0, which is never posted"),
    ("SEND_B1.0>0", "", "rank 1: SEND_B1.0>0, needed by B0.0, is missing"),
    ("SEND_F0.0>1", "SEND_F0.0>1 SEND_F0.0>1", "SEND_F0.0>1 appears twice"),
    ("RECV_F1.0<0", "RECV_F1.0<0 RECV_F1.0<0", "RECV_F1.0<0 appears twice"),
    ("SEND_F0.0>1", "SEND_F0.0>1 SEND_F0.7>1", "SEND_F0.7>1 appears without F0.7"),
    (
        "SEND_F0.0>1",
        "SEND_F0.0>1 SEND_F0.0>9",
        "rank 0: SEND_F0.0>9 is a transfer with stage 9, which does not exist",
    ),
    ("B0.0 REDUCE0", "REDUCE0 B0.0", "rank 0: REDUCE0 comes before B0.0"),
    ("REDUCE0", "", "B0.0 appears without REDUCE0"),
    ("REDUCE0", "REDUCE0 REDUCE2", "REDUCE2 names a stage that does not exist"),
    ("F0.0 SEND", "F0 F0.0 SEND", "rank 0: F0 has no microbatch"),
]


def test_the_sound_one_is_sound():
    assert simulate(parse_orders(SOUND)).makespan == 6.0


@pytest.mark.parametrize(("old", "new", "finding"), SLIPS, ids=[finding for _, _, finding in SLIPS])
def test_a_slip_is_named(old: str, new: str, finding: str):
    assert SOUND.count(old) >= 1
    assert finding in fact_of(SOUND.replace(old, new, 1))


def test_all_findings_come_at_once():
    fact = fact_of(
        SOUND.replace("RECV_F1.0<0 F1.0", "F1.0 RECV_F1.0<0").replace("B0.0 REDUCE0", "REDUCE0 B0.0")
    )
    assert "F1.0 comes before RECV_F1.0<0" in fact
    assert "REDUCE0 comes before B0.0" in fact


def test_many_findings_are_counted():
    orders = with_chain(one_f_one_b(p=2, m=40), 2)
    orders[1] = [action for action in orders[1] if action.kind is not Kind.B]
    assert fact_of(orders).endswith("and 20 more")


def test_every_rank_has_as_many_stages():
    orders = "F0.0 F1.0 F2.0 B2.0 B1.0 B0.0\nF3.0 B3.0"
    assert fact_of(orders) == "ranks have different numbers of stages: 3, 1"


def test_a_channel_has_one_order():
    orders = with_chain(gpipe(p=2, m=2), 2)
    first, second = parse("RECV_F1.0<0"), parse("RECV_F1.1<0")
    orders[1] = [second, first] + [action for action in orders[1] if action not in (first, second)]
    assert (
        fact_of(orders) == "rank 0 sends SEND_F0.0>1 where rank 1 posts RECV_F1.1<0: a channel has one order"
    )


def test_forward_and_backward_share_a_channel():
    """With p=2 and v=2, rank 0 sends F0 > 1 and B2 > 1 to rank 1: these two may not overtake each other either."""
    orders = with_chain(interleaved(2, 2, 2), 4)
    gradient = parse("RECV_B1.0<2")
    orders[1] = [gradient] + [action for action in orders[1] if action != gradient]
    assert "posts RECV_B1.0<2: a channel has one order" in fact_of(orders)


def test_a_computation_left_out_is_found_where_transfers_are_added():
    with pytest.raises(PlanError, match=r"rank 0: F0.1 is missing; rank 0: B0.1 is missing"):
        add_transfers(parse_orders("F0.0 B0.0\nF1.0 F1.1 B1.0 B1.1"), chain(2))


def test_given_links_must_be_served():
    links = [*chain(3), (0, 2, True)]
    fact = fact_of(with_chain(one_f_one_b(p=3, m=1), 3), links)
    assert "F2.0 needs RECV_F2.0<0, which is never posted" in fact
    assert "SEND_B2.0>0, needed by B0.0, is missing" in fact
    fact = fact_of(add_transfers(one_f_one_b(p=3, m=1), links), chain(3))
    assert "SEND_F0.0>2 serves no link between ranks" in fact


def test_a_microbatch_too_many_is_no_other_action():
    """Actions are checked as numbers: F1.2 must not be taken for B1.0 where m is 1."""
    assert "rank 1: B1.0 is missing" in fact_of("F0.0 B0.0\nF1.0 F1.2")


# deadlocks


def test_a_deadlock_shows_everybody_and_the_circle():
    fact = fact_of("""
        F0.0 SEND_F0.0>1 RECV_B0.0<1 B0.0 F0.1 SEND_F0.1>1 RECV_B0.1<1 B0.1
        RECV_F1.0<0 F1.0 RECV_F1.1<0 F1.1 B1.0 SEND_B1.0>0 B1.1 SEND_B1.1>0
    """)
    assert "rank 0 waits in B0.0 for message SEND_B1.0>0 of rank 1" in fact
    assert "rank 1 waits in F1.1 for message SEND_F0.1>1 of rank 0" in fact
    assert fact.startswith("deadlock: ")
    assert fact.endswith("cycle of ranks: 0 -> 1 -> 0")


def test_a_bystander_is_named_but_not_in_the_circle():
    fact = fact_of("F0.0 F0.1 B0.0 B0.1\nF1.0 B1.0 F1.1 B1.1\nF2.0 F2.1 B2.0 B2.1\n")
    assert "rank 0 waits in B0.0 for B1.0 of rank 1" in fact
    assert fact.endswith("cycle of ranks: 1 -> 2 -> 1")


def test_a_rank_may_wait_for_itself():
    fact = fact_of("F1.0 F0.0 B1.0 B0.0")
    assert "rank 0 waits in F1.0 for F0.0 of rank 0" in fact
    assert fact.endswith("cycle of ranks: 0 -> 0")


def test_a_link_within_a_rank_is_a_dependency():
    orders = with_chain(interleaved(2, 2, 2), 4)
    skip = Action(Kind.F, 2, 0)
    swapped = [[skip, *[action for action in orders[0] if action != skip]], orders[1]]
    assert fact_of(swapped, [*chain(4), (0, 2, True)])


def test_a_large_schedule_is_no_trouble():
    p, v, m = 16, 2, 64
    result = simulate(with_chain(interleaved(p, v, m), p * v))
    assert result.bubble == pytest.approx((p - 1) / (v * m))
