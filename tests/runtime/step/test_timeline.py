"""Timelines of executed steps: what is in them, and that a step takes as long as the simulation says, whatever the schedule."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

import pytest

from autoptd.ir.actions import COMPUTES, SCHEDULES, Kind
from autoptd.program.program import Program
from autoptd.runtime.measure.record import recording
from autoptd.runtime.step.timeline import Timeline
from autoptd.schedule import simulate
from tests.runtime.step.test_executor import evaluate, running, step
from tests.runtime.tied_model import Case, make_batch, make_model, make_program

# Seconds of a forward, beside which the stages' own work is to be little. Where other programs keep the machine so busy that
# threads are late to wake up, it takes longer ones, each of which is tried if the one before was not long enough.
UNITS = (0.03, 0.1, 0.3)
P, M = 4, 6


# The others wait for the same messages, in other orders.
DEFAULT = {"interleaved", "zbv"}


@pytest.mark.parametrize(
    "schedule",
    [pytest.param(name, marks=[] if name in DEFAULT else pytest.mark.thorough) for name in SCHEDULES],
)
def test_a_step_takes_as_long_as_simulated(schedule: str) -> None:
    """Delays that dominate: the executed finish is within 5% of the simulated one."""
    v = SCHEDULES[schedule] or 2
    model, m = make_model(P * v), M if v == 1 else P
    program = make_program(Case(p=P, v=v, m=m, schedule=schedule, rows=m, layers=P * v), model)
    # Stages differ, so that an order in which any of them waits for the wrong one takes another time.
    forward = [(1.0, 1.5, 0.8, 1.2)[stage % 4] / v for stage in range(P * v)]
    has_w = any(action.kind is Kind.W for order in program.orders for action in order)
    wishes = {(stage, Kind.F): seconds for stage, seconds in enumerate(forward)}
    wishes |= {(stage, Kind.B): (1.2 if has_w else 2.0) * seconds for stage, seconds in enumerate(forward)}
    wishes |= {(stage, Kind.W): 0.8 * seconds for stage, seconds in enumerate(forward)}
    told = []
    with running(program, model) as ranks:
        step(ranks, program, make_batch(m))
        for unit in UNITS:
            delays = {key: unit * seconds for key, seconds in wishes.items()}
            with ranks.timed(delays) as timeline:
                step(ranks, program, make_batch(m))
            asked, were = simulated(program, delays), simulated(program, lasted(timeline))
            assert timeline.makespan >= 0.999 * asked  # nothing overtakes what it waits for
            if timeline.makespan <= 1.05 * asked or abs(timeline.makespan - were) <= 0.05 * were:
                return
            told.append(
                f"{timeline.makespan:.3f} s, simulated {asked:.3f}, with actions that last as they did {were:.3f}"
            )
    pytest.fail("; ".join(told))


def simulated(program: Program, seconds: Mapping[tuple[int, Kind], float]) -> float:
    """When the simulation ends, given the time of each action by (stage, kind)."""
    forward, backward, weight_gradient = (
        [seconds.get((stage.index, kind), 1.0) for stage in program.stages]
        for kind in (Kind.F, Kind.B, Kind.W)
    )
    if any(action.kind is Kind.W for order in program.orders for action in order):
        backward = [one + other for one, other in zip(backward, weight_gradient, strict=True)]  # both parts
    return simulate(
        program.orders, forward=forward, backward=backward, weight_gradient=weight_gradient
    ).makespan


def lasted(timeline: Timeline) -> dict[tuple[int, Kind], float]:
    """How long actions took, on average over microbatches: the delay, and as much as the thread was late after it."""
    found: dict[tuple[int, Kind], list[float]] = {}
    for span in timeline.spans:
        found.setdefault((span.action.stage, span.action.kind), []).append(span.end - span.start)
    return {key: statistics.fmean(all_of_them) for key, all_of_them in found.items()}


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
    assert timeline.bubble > 0 and timeline.makespan >= 0.4


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
        assert [span.action for span in record.spans] == [
            action for order in program.orders for action in order
        ]
