"""Where the time of a training step goes, rank by rank, measured while it runs; and the most memory that a rank held.

In: running ranks, and what steps them. Out: a `StepTimes` of every rank, on every rank. On CUDA every action and every
collective waits for the device meanwhile, so that times are the device's; a measured step takes longer than one that is not.
What runs beside computation (a collective that is started, and waited for later) is left to do so: it counts from where the
rank waits for it.

    loss, times = measured(ranks, lambda ranks: ranks.run("step", step))
    times[0].compute + times[0].communication + times[0].waiting == times[0].seconds
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch

from autoptd.ir.actions import COMPUTES, phase_of
from autoptd.runtime.launch import Rank, RunningRanks
from autoptd.runtime.record import Note, cover
from autoptd.runtime.world.world import World

Result = TypeVar("Result")
AT_THE_END = ("loss", "count of labels", "dtype of the loss")  # ranks meet there: most of it is waiting for the slowest


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
    """The seconds that one rank spends in collectives, by whether a forward or a backward makes them."""

    def __init__(self, world: World, clock: Callable[[], float]) -> None:
        self.world, self.clock = world, clock
        self.inside = self.between = 0.0

    @contextmanager
    def note(self, kind: str, ranks: Sequence[int], payload: int, site: str) -> Iterator[None]:
        """One call, made inside."""
        start = self.clock()
        yield
        if site in AT_THE_END or kind == "send":
            return
        if phase_of(self.world.at)[1] >= 0:
            self.inside += self.clock() - start
        else:
            self.between += self.clock() - start


def measured(ranks: RunningRanks, step: Callable[[RunningRanks], Result]) -> tuple[Result, tuple[StepTimes, ...]]:
    """Call `step(ranks)`; return what it does, and the times of all ranks of the world, ascending. A collective."""
    device = ranks.here[0].world.device
    clock = time.perf_counter if device.type != "cuda" else _device_clock
    watches = {one.world.rank: _Watch(one.world, clock) for one in ranks.here}
    with ranks.timed(clock=clock) as timeline:
        notes: list[Note] = [watches[one.world.rank].note for one in ranks.here]
        starts: list[Note] = [_nothing] * len(notes) if device.type == "cuda" else notes  # the device goes on meanwhile
        covered = [
            cover(one.world, note, start, wait=note) for one, note, start in zip(ranks.here, notes, starts, strict=True)
        ]
        start = clock()
        try:
            result = step(ranks)
        finally:
            for uncover in covered:
                uncover()
        seconds = clock() - start

    def gather(rank: Rank) -> tuple[StepTimes, ...]:
        mine = rank.world.rank
        spans = [one for one in timeline.watches[mine].spans if one.action.kind in COMPUTES]
        compute = sum(one.end - one.start for one in spans) - watches[mine].inside
        communication = watches[mine].inside + watches[mine].between
        waiting = max(0.0, seconds - compute - communication)
        times = StepTimes(mine, seconds, compute, communication, waiting, peak_bytes(rank.world.device))
        return tuple(rank.world.everyone().gather_objects(times, "times of the step"))

    return result, ranks.run("times of the step", gather)


@contextmanager
def _nothing(kind: str, ranks: Sequence[int], payload: int, site: str) -> Iterator[None]:
    """A call that takes no time of its own."""
    yield


def _device_clock() -> float:
    """When the current stream is done; what runs on others (collectives that were started) goes on."""
    torch.cuda.current_stream().synchronize()
    return time.perf_counter()


def peak_bytes(device: torch.device) -> int:
    """The most memory held so far: see `StepTimes`."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource  # not on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


__all__ = ["StepTimes", "measured", "peak_bytes"]
