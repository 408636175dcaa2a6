"""Where the time of a training step goes, rank by rank, measured while it runs; and the most memory that a rank held.

In: running ranks, and what steps them. Out: a `StepTimes` of every rank, on every rank. On CUDA times are the device's, by
events around every action and every collective, which are read after the step. What runs beside computation (a collective that
is started, and waited for later) is left to do so: it counts from where the rank waits for it.

    loss, times = measured(ranks, lambda ranks: ranks.run("step", step))
    times[0].compute + times[0].communication + times[0].waiting == times[0].seconds
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from autoptd.ir.actions import COMPUTES, phase_of
from autoptd.runtime.clocks import Clock
from autoptd.runtime.launch import Rank, RunningRanks
from autoptd.runtime.record import Note, cover
from autoptd.runtime.world.world import World, on_device

Result = TypeVar("Result")
AT_THE_END = (
    "loss",
    "count of labels",
    "dtype of the loss",
)  # ranks meet there: most of it is waiting for the slowest


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one step on one rank: `compute` in forward and backward, `communication` in collectives that nothing hides,
    `waiting` is what is left: for other stages (the bubble), sends, the sum of the loss, Python. `peak_bytes`: the most that
    the device's allocator gave out so far, on the CPU the largest resident set of the process.
    """

    rank: int
    seconds: float
    compute: float
    communication: float
    waiting: float
    peak_bytes: int


class _Watch:
    """When one rank was in collectives, by whether a forward or a backward makes them."""

    def __init__(self, world: World, clock: Clock) -> None:
        self.world, self.clock = world, clock
        self.inside: list[tuple[Any, Any]] = []
        self.between: list[tuple[Any, Any]] = []

    @contextmanager
    def note(self, kind: str, ranks: Sequence[int], payload: int, site: str) -> Iterator[None]:
        """One call, made inside."""
        start = self.clock.now()
        yield
        if site in AT_THE_END or kind == "send":
            return
        times = self.inside if phase_of(self.world.at)[1] >= 0 else self.between
        times.append((start, self.clock.now()))

    def seconds(self, times: list[tuple[Any, Any]]) -> float:
        return sum(self.clock.seconds(end) - self.clock.seconds(start) for start, end in times)


def measured(
    ranks: RunningRanks, step: Callable[[RunningRanks], Result]
) -> tuple[Result, tuple[StepTimes, ...]]:
    """Call `step(ranks)`; return what it does, and the times of all ranks of the world, ascending. A collective."""
    device = ranks.here[0].world.device
    with ranks.timed() as timeline:
        clocks = {number: watch.clock for number, watch in timeline.watches.items()}
        watches = {one.world.rank: _Watch(one.world, clocks[one.world.rank]) for one in ranks.here}
        notes: list[Note] = [watches[one.world.rank].note for one in ranks.here]
        starts: list[Note] = (
            [_nothing] * len(notes) if device.type == "cuda" else notes
        )  # the device goes on meanwhile
        covered = [
            cover(one.world, note, start, wait=note)
            for one, note, start in zip(ranks.here, notes, starts, strict=True)
        ]
        clock = clocks[ranks.here[0].world.rank]
        with on_device(device):
            start = clock.now()
        try:
            result = step(ranks)
        finally:
            for uncover in covered:
                uncover()
        with on_device(device):
            seconds = clock.seconds(clock.now()) - clock.seconds(start)

    def gather(rank: Rank) -> tuple[StepTimes, ...]:
        mine = rank.world.rank
        spans = [one for one in timeline.watches[mine].spans if one.action.kind in COMPUTES]
        inside, between = (
            watches[mine].seconds(times) for times in (watches[mine].inside, watches[mine].between)
        )
        compute = sum(one.end - one.start for one in spans) - inside
        communication = inside + between
        waiting = max(0.0, seconds - compute - communication)
        times = StepTimes(mine, seconds, compute, communication, waiting, peak_bytes(rank.world.device))
        return tuple(rank.world.everyone().gather_objects(times, "times of the step"))

    return result, ranks.run("times of the step", gather)


@contextmanager
def _nothing(kind: str, ranks: Sequence[int], payload: int, site: str) -> Iterator[None]:
    """A call that takes no time of its own."""
    yield


def peak_bytes(device: torch.device) -> int:
    """The most memory held so far: see `StepTimes`."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource  # not on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


__all__ = ["StepTimes", "measured", "peak_bytes"]
