"""Timelines of executed steps: what is in them, and that a step takes as long as the simulation says, whatever the schedule."""

from __future__ import annotations

import pytest

from autoptd.ir.actions import COMPUTES, Kind
from autoptd.runtime.record import recording
from autoptd.schedule import simulate
from tests.runtime.test_executor import evaluate, running, step
from tests.runtime.tied_model import Case, make_batch, make_model, make_program

UNIT = 0.03  # seconds of a forward: the stages' own work is 1 or 2% of it
P, M = 4, 6
SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)]
TRIES = 3  # somebody else's burst of work on this machine is no fault of the executor


@pytest.mark.parametrize(("schedule", "v"), SCHEDULES)
def test_a_step_takes_as_long_as_simulated(schedule: str, v: int) -> None:
    """Delays that dominate: the executed finish is within 5% of the simulated one (the best of some tries)."""
    model, m = make_model(P * v), M if v == 1 else P
    program = make_program(Case(p=P, v=v, m=m, schedule=schedule, rows=m, layers=P * v), model)
    # Stages differ, so that an order in which any of them waits for the wrong one takes another time.
    forward = [UNIT * (1.0, 1.5, 0.8, 1.2)[stage % 4] / v for stage in range(P * v)]
    backward = [2 * one for one in forward]
    weight_gradient = [0.8 * one for one in forward]
    delays = {(stage, Kind.F): seconds for stage, seconds in enumerate(forward)}
    delays |= {(stage, Kind.B): seconds for stage, seconds in enumerate(backward)}
    if any(action.kind is Kind.W for order in program.orders for action in order):
        delays |= {(stage, Kind.W): seconds for stage, seconds in enumerate(weight_gradient)}
        delays |= {(stage, Kind.B): backward[stage] - weight_gradient[stage] for stage in range(P * v)}
    wanted = simulate(program.orders, forward=forward, backward=backward, weight_gradient=weight_gradient)
    batch, found = make_batch(m), []
    with running(program, model) as ranks:
        step(ranks, program, batch)
        while len(found) < TRIES and not any(abs(one - wanted.finish) <= 0.05 * wanted.finish for one in found):
            with ranks.timed(delays) as timeline:
                step(ranks, program, batch)
            found.append(timeline.finish)
    assert min(abs(one / wanted.finish - 1) for one in found) <= 0.05, (found, wanted.finish)
    assert min(found) >= 0.999 * wanted.finish  # nothing overtakes what it waits for


def test_spans_are_the_order_and_stop_with_the_timeline() -> None:
    model = make_model()
    program = make_program(Case(p=2, m=2), model)
    with running(program, model) as ranks:
        with ranks.timed({(1, Kind.SEND_B): 0.01}) as timeline:
            step(ranks, program, make_batch())
        for rank, order in enumerate(program.orders):
            mine = [span for span in timeline.spans if span.rank == rank]
            assert [span.action for span in mine] == order
            ends = [0.0, *(span.end for span in mine)]
            assert all(end <= span.start <= span.end for end, span in zip(ends, mine, strict=False))
        held = [span.end - span.start for span in timeline.spans if span.action.kind is Kind.SEND_B]
        assert len(held) == 2 and all(one >= 0.01 for one in held)
        count = len(timeline.spans)
        step(ranks, program, make_batch())
        assert len(timeline.spans) == count and all(rank.executor.watch is None for rank in ranks.here)


def test_what_a_rank_waits_for_is_not_in_its_spans() -> None:
    """F1.0 waits for F0.0, which is held up: its span starts after that, and so do both B."""
    model = make_model()
    program = make_program(Case(p=2, m=1, rows=2), model)
    with running(program, model) as ranks, ranks.timed({(0, Kind.F): 0.2, (1, Kind.B): 0.2}) as timeline:
        step(ranks, program, make_batch(2))
    spans = {str(span.action): span for span in timeline.spans if span.action.kind in COMPUTES}
    assert spans["F0.0"].end - spans["F0.0"].start >= 0.2 <= spans["B1.0"].end - spans["B1.0"].start
    assert spans["F1.0"].start >= spans["F0.0"].end and spans["B0.0"].start >= spans["B1.0"].end
    assert timeline.bubble > 0 and timeline.finish >= 0.4


def test_an_evaluation_is_timed_too() -> None:
    model = make_model()
    program = make_program(Case(p=2), model)
    with running(program, model) as ranks, ranks.timed() as timeline:
        evaluate(ranks, program, make_batch())
    assert {span.action.kind for span in timeline.spans} == {Kind.F, Kind.SEND_F, Kind.RECV_F}


def test_a_record_has_the_spans() -> None:
    model = make_model()
    program = make_program(Case(p=2), model)
    with running(program, model) as ranks:
        with recording(ranks) as (recorded, record):
            step(recorded, program, make_batch())  # type: ignore[arg-type]
        assert [span.action for span in record.spans] == [action for order in program.orders for action in order]
