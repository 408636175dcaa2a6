"""Clocks of devices that their hosts run ahead of, by a stand-in for events: no wait in a step, and the device's times."""

from __future__ import annotations

import pytest
import torch

from autoptd.ir.actions import Kind
from autoptd.runtime.measure.stepclock import measured
from autoptd.runtime.step import launch
from autoptd.runtime.step.timeline import Clock, DeviceClock, clocks_of
from tests.runtime.step.test_executor import running, step
from tests.runtime.tied_model import Case, make_batch, make_model, make_program

PER_EVENT = 2.0  # milliseconds that the device takes from one event to the next, whatever the host takes


class FakeStream:
    """Gives events their times; refuses to be waited for while a step runs."""

    def __init__(self) -> None:
        self.count, self.is_stepping, self.waits = 0, False, 0

    def event(self) -> FakeEvent:
        return FakeEvent(self)


class FakeEvent:
    def __init__(self, stream: FakeStream) -> None:
        self._stream, self._is_awaited, self.at = stream, False, -1.0

    def record(self) -> None:
        self.at, self._stream.count = self._stream.count * PER_EVENT, self._stream.count + 1

    def synchronize(self) -> None:
        assert not self._stream.is_stepping, "waits for the device in a step"
        self._is_awaited, self._stream.waits = True, self._stream.waits + 1

    def elapsed_time(self, later: FakeEvent) -> float:
        assert later._is_awaited, "asked before it is known"
        return later.at - self.at


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[FakeStream]:
    """One per rank, in the place of what `clocks_of` would find."""
    made: list[FakeStream] = []

    def clocks(devices: list[torch.device]) -> list[Clock]:
        made[:] = [FakeStream() for _ in devices]
        return [DeviceClock(stream.event, 10.0 * number) for number, stream in enumerate(made)]

    monkeypatch.setattr(launch, "clocks_of", clocks)
    return made


def test_spans_are_the_devices_and_a_step_does_not_wait(streams: list[FakeStream]) -> None:
    model = make_model()
    program = make_program(Case(p=2, m=2), model)
    with running(program, model) as ranks, ranks.timed() as timeline:
        for stream in streams:
            stream.is_stepping = True
        step(ranks, program, make_batch())
        for stream in streams:
            stream.is_stepping = False
        waits = [stream.waits for stream in streams]
        assert waits == [0, 0]
        for rank, order in enumerate(program.orders):
            mine = [span for span in timeline.spans if span.rank == rank]
            assert [span.action for span in mine] == order
            # Each action leaves two events behind that of the origin; the ranks' devices began at their own times.
            starts = [10.0 * rank + (1 + 2 * number) * PER_EVENT / 1e3 for number in range(len(order))]
            assert [span.start for span in mine] == pytest.approx(starts)
            assert [span.end - span.start for span in mine] == pytest.approx([PER_EVENT / 1e3] * len(order))
        assert timeline.spans == timeline.spans and len(timeline.spans) == sum(map(len, program.orders))


def test_a_measured_step_adds_up_on_the_device(streams: list[FakeStream]) -> None:
    """Computations with a collective inside have its two events within their own two."""
    model = make_model()
    program = make_program(Case(t=2, m=2), model)
    with running(program, model) as ranks:
        _, times = measured(ranks, lambda ranks: step(ranks, program, make_batch()))
    computes = sum(action.kind in (Kind.F, Kind.B) for action in program.orders[0])
    assert len(times) == 2 and times[0].compute == pytest.approx(times[1].compute)
    for one in times:
        assert one.communication > 0 and one.waiting > 0
        assert one.compute + one.communication + one.waiting == pytest.approx(one.seconds)
        assert one.compute >= computes * PER_EVENT / 1e3 - 1e-9
    # The first rank's stream also has the events of the whole.
    assert times[0].seconds == pytest.approx((streams[0].count - 2) * PER_EVENT / 1e3)


def test_a_host_that_is_its_own_device_is_timed_by_its_clock() -> None:
    first, second = clocks_of([torch.device("cpu")] * 2)
    before, after = first.now(), first.now()
    assert 0 <= first.seconds(before) <= first.seconds(after) and first.seconds(after) == second.seconds(
        after
    )
