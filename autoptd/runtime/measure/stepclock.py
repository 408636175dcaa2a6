"""Where the time of a training step goes, rank by rank, measured while it runs; and the most memory that a rank held.

In: running ranks, and a function that steps them. Out: a `StepTimes` of every rank, on every rank. On CUDA times are the
device's, by events around every action and every collective, which are read after the step. A collective that overlaps
with computation keeps doing so, and counts only for the time that the rank waits for it.

    loss, times = measured(ranks, lambda ranks: ranks.run("step", step))
    times[0].compute + times[0].communication + times[0].waiting == times[0].seconds
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from socket import gethostname
from typing import Any, TypeVar

import torch

from autoptd.ir.actions import COMPUTES, phase_of
from autoptd.runtime.measure.cover import Note, cover
from autoptd.runtime.step.launch import Rank, RunningRanks
from autoptd.runtime.step.timeline import Clock, Span
from autoptd.runtime.world.world import World, on_device

Result = TypeVar("Result")
# Collectives of all ranks at the start or end of a step: most of their time is waiting for the slowest rank.
SYNCHRONISING = ("loss", "count of labels", "sums over the batch", "dtype of the loss")


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one step on one rank: `compute` in forward and backward, `communication` in collectives that do not
    overlap with it, `waiting` the rest: for other stages (the bubble), sends, the sum of the loss, Python.

    `peak_bytes` is the peak of the device's allocator so far, on the CPU the largest resident set of the process.
    """

    rank: int
    seconds: float
    compute: float
    communication: float
    waiting: float
    peak_bytes: int
    host: str = ""


class _Watch:
    """When one rank was in collectives: `inside` a forward or backward, or `between` them."""

    def __init__(self, world: World, clock: Clock) -> None:
        self.world, self.clock = world, clock
        self.inside: list[tuple[Any, Any]] = []
        self.between: list[tuple[Any, Any]] = []

    @contextmanager
    def note(self, kind: str, ranks: Sequence[int], payload: int, site: str) -> Iterator[None]:
        """Time one call, made in the `with` block."""
        start = self.clock.now()
        yield
        if site in SYNCHRONISING or kind == "send":
            return
        _, stage = phase_of(self.world.at)
        times = self.inside if stage >= 0 else self.between
        times.append((start, self.clock.now()))

    def seconds(self, times: list[tuple[Any, Any]]) -> float:
        """Return the total of some calls; waits for the device."""
        return sum(self.clock.seconds(end) - self.clock.seconds(start) for start, end in times)


def measured(
    ranks: RunningRanks, step: Callable[[RunningRanks], Result]
) -> tuple[Result, tuple[StepTimes, ...]]:
    """Call `step(ranks)`; return its result, and the times of all ranks of the world, ascending. A collective."""
    device = ranks.here[0].world.device
    with ranks.timed() as timeline:
        clocks = {number: watch.clock for number, watch in timeline.watches.items()}
        watches: dict[int, _Watch] = {}
        covered = []
        for rank in ranks.here:
            watch = watches[rank.world.rank] = _Watch(rank.world, clocks[rank.world.rank])
            # On CUDA starting a collective takes no device time: the device continues its current work.
            start_note: Note = _nothing if device.type == "cuda" else watch.note
            covered.append(cover(rank.world, watch.note, start_note, wait=watch.note))
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
        spans = timeline.watches[rank.world.rank].spans
        times = _times_of(rank.world, watches[rank.world.rank], spans, seconds)
        return tuple(rank.world.everyone().gather_objects(times, "times of the step"))

    return result, ranks.run("times of the step", gather)


def _times_of(world: World, watch: _Watch, spans: Sequence[Span], seconds: float) -> StepTimes:
    """Divide the `seconds` of a step among what one rank did."""
    inside = watch.seconds(watch.inside)
    # A span includes the collectives within it, such as a layer's all-reduce.
    compute = sum(span.end - span.start for span in spans if span.action.kind in COMPUTES) - inside
    communication = inside + watch.seconds(watch.between)
    # Spans and calls are timed at slightly different moments, so the rest may come out just below 0.
    waiting = max(0.0, seconds - compute - communication)
    return StepTimes(
        world.rank, seconds, compute, communication, waiting, peak_bytes(world.device), gethostname()
    )


@contextmanager
def _nothing(kind: str, ranks: Sequence[int], payload: int, site: str) -> Iterator[None]:
    """Time nothing: the call does not count."""
    yield


def peak_bytes(device: torch.device) -> int:
    """Return the most bytes held so far: see `StepTimes`."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # Not at the top: Windows does not have it.
    import resource

    # In bytes on macOS, in KiB elsewhere.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
