import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoptd.ir.actions import COMPUTES, RECVS, SENDS, Action, Kind, format_orders, parse, parse_orders

TEXTS = {
    "F2.1": Action(Kind.F, 2, 1),
    "B10.32": Action(Kind.B, 10, 32),
    "W0.7": Action(Kind.W, 0, 7),
    "SEND_F2.1>3": Action(Kind.SEND_F, 2, 1, 3),
    "RECV_F3.1<2": Action(Kind.RECV_F, 3, 1, 2),
    "SEND_B3.0>2": Action(Kind.SEND_B, 3, 0, 2),
    "RECV_B2.0<3": Action(Kind.RECV_B, 2, 0, 3),
    "REDUCE2": Action(Kind.REDUCE, 2),
}


@pytest.mark.parametrize("text", TEXTS)
def test_an_action_prints_as_its_text_and_parses_back(text: str):
    assert str(TEXTS[text]) == text
    assert parse(text) == TEXTS[text]


@pytest.mark.parametrize(
    "text", ["", "F", "G1.0", "F1.0 ", "F01.0", "F1.", "F-1.0", "SEND_F2.1<3", "RECV_F3.1>2", "f1.0"]
)
def test_what_is_no_action_is_refused(text: str):
    with pytest.raises(ValueError, match="is not an action"):
        parse(text)


@st.composite
def actions(draw: st.DrawFn) -> Action:
    kind, number = draw(st.sampled_from(Kind)), st.integers(0, 999)
    if kind is Kind.REDUCE:
        return Action(kind, draw(number))
    return Action(kind, draw(number), draw(number), -1 if kind in COMPUTES else draw(number))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(actions(), min_size=1), min_size=1))
def test_orders_survive_their_text(orders: list[list[Action]]):
    assert parse_orders(format_orders(orders)) == orders


def test_comments_and_empty_lines_are_skipped():
    assert parse_orders("# rank 0\nF0.0 B0.0\n\n  # rank 1\n  F1.0  B1.0\n") == [
        [Action(Kind.F, 0, 0), Action(Kind.B, 0, 0)],
        [Action(Kind.F, 1, 0), Action(Kind.B, 1, 0)],
    ]


def test_every_kind_has_one_role():
    assert set(SENDS) | set(RECVS) | set(COMPUTES) | {Kind.REDUCE} == set(Kind)
    assert len(SENDS) + len(RECVS) + len(COMPUTES) + 1 == len(Kind)
