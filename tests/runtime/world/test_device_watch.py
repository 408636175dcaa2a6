"""The watch on a rank's device: what is late, who is told, when groups are aborted; with a stand-in for events and groups."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from autoptd.errors import RuntimeFault
from autoptd.runtime.world import device_watch, faults
from autoptd.runtime.world.device_watch import DeviceWatch, Marks
from autoptd.runtime.world.faults import Call, FaultBoard
from tests.waits import wait_until

SUM = Call("all_reduce", "h.0.mlp", (0, 1), 3, 16)
NEXT = Call("all_reduce", "h.1.mlp", (0, 1), 4, 16)


class FakeDevice:
    """Reaches what it is told to reach."""

    def __init__(self) -> None:
        self.probes: list[Any] = []

    def probe(self) -> Any:
        made = SimpleNamespace(done=False, recorded=0)
        made.record = lambda: vars(made).update(done=False, recorded=made.recorded + 1)
        made.is_done = lambda: made.done
        self.probes.append(made)
        return made


def test_a_mark_is_late_since_the_device_reached_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(device_watch.time, "monotonic", lambda: now[0])
    device = FakeDevice()
    marks = Marks(device.probe)
    assert marks.late(0.0) is None
    marks.add("F0.0", SUM)
    marks.add("F0.1", NEXT)
    now[0] = 110.0
    mark, seconds = marks.late(5.0) or pytest.fail("nothing is late")
    assert (mark.at, mark.call, seconds) == ("F0.0", SUM, 10.0) and marks.late(11.0) is None
    device.probes[0].done = True
    assert marks.late(5.0) is None, "the device goes on: the second has all its time before it"
    now[0] = 116.0
    mark, seconds = marks.late(5.0) or pytest.fail("nothing is late")
    assert (mark.at, seconds) == ("F0.1", 6.0)
    device.probes[1].done = True
    assert marks.late(5.0) is None
    marks.add("F0.0", SUM)
    assert len(device.probes) == 2 and sum(one.recorded for one in device.probes) == 3, (
        "probes are used again"
    )


@contextmanager
def watched(monkeypatch: pytest.MonkeyPatch, timeout: float = 60.0) -> Iterator[tuple[Any, list[str]]]:
    """Two ranks' boards (the second one is a text in the store at first), a watch on the first, and what was aborted."""
    monkeypatch.setattr(faults, "BEAT", 0.1)
    monkeypatch.setattr(faults, "GRACE", 0.4)
    monkeypatch.setattr(device_watch, "BEAT", 0.1)
    monkeypatch.setattr(device_watch, "BETWEEN", 0.02)
    store, device, aborted = dist.HashStore(), FakeDevice(), []
    worlds = [
        SimpleNamespace(
            rank=rank, at="F0.1", timeout=timeout, device=torch.device("cpu"), mesh=SimpleNamespace(size=2)
        )
        for rank in range(2)
    ]
    mine, other = (FaultBoard(store, world) for world in worlds)  # type: ignore[arg-type]
    watch = DeviceWatch(mine, worlds[0], device.probe, lambda: aborted.append("groups"))  # type: ignore[arg-type, func-returns-value]
    try:
        yield SimpleNamespace(mine=mine, other=other, watch=watch, device=device, worlds=worlds), aborted
    finally:
        watch.close()
        mine.close()
        other.close()


def test_a_fault_of_a_peer_is_told_once_and_ends_the_world(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(device_watch, "GRACE", 0.2)
    with watched(monkeypatch) as (here, aborted):
        here.mine.enter(SUM)
        here.mine.leave()
        here.other.report(ValueError("no such word"))
        wait_until(lambda: aborted)
        for _ in range(2):  # nobody gets past it
            with pytest.raises(RuntimeFault, match=r"rank 1 at F0\.1: ValueError: no such word"):
                here.mine.enter(NEXT)
        with pytest.raises(RuntimeFault, match="no such word"):
            here.mine.raise_first()
    assert aborted == ["groups"]
    assert (
        capsys.readouterr().err.count("autoptd: RuntimeFault: rank 1 at F0.1: ValueError: no such word") == 1
    )


def test_a_main_thread_that_comes_out_keeps_its_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks may have raised alike, and go on."""
    with watched(monkeypatch) as (here, aborted):
        here.other.report(ValueError("no such word"))
        wait_until(lambda: here.mine.is_known)
        with pytest.raises(RuntimeFault, match="no such word"):
            here.mine.raise_first()
        here.mine.raise_first()  # told once
        here.mine.enter(NEXT)
        here.mine.leave()
        time.sleep(0.2)
        assert not aborted
        here.watch.close()
    assert aborted == ["groups"], "the end of a group would wait for what cannot end"


@pytest.mark.one_in(9)
@pytest.mark.parametrize("where", ["on the device", "in a call"])
def test_a_rank_that_hangs_is_diagnosed_after_the_timeout(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], where: str
) -> None:
    with watched(monkeypatch, timeout=0.5) as (here, aborted):
        here.other.enter(Call("all_reduce", "h.9.mlp", (0, 1), 2, 16))
        here.other.leave()
        here.mine.enter(SUM)
        if where == "on the device":
            here.mine.leave()
            here.watch.mark()
            here.worlds[0].at = "between steps"  # where the host is
        wait_until(lambda: aborted)
        with pytest.raises(RuntimeFault) as caught:
            here.mine.raise_first()
    text = str(caught.value)
    assert "rank 0 at F0.1: all_reduce 'h.0.mlp' of 16 bytes failed; rank 1 is hung or slow" in text
    assert text in capsys.readouterr().err


def test_a_rank_whose_device_is_late_is_not_taken_for_hung(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its host is in no call; its beats tell where the device is."""
    with watched(monkeypatch) as (here, _):
        here.mine.enter(SUM)
        here.mine.leave()
        here.watch.mark()
        here.worlds[0].at = "between steps"
        wait_until(lambda: here.mine.behind == ("F0.1", SUM))
        fault = here.other.diagnose(NEXT, TimeoutError("late"), "F0.2")
        assert "rank 0 is waiting as well: it was last known at F0.1 in all_reduce 'h.0.mlp'" in str(fault)
        here.device.probes[0].done = True
        wait_until(lambda: here.mine.behind is None)


def test_a_thread_of_the_watch_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    with watched(monkeypatch) as (here, aborted):
        here.watch.close()
        assert not any(one.name == "device watch" for one in threading.enumerate()) and not aborted
