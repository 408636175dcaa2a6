"""Compare runs that take turns: the machine's other work then meets all of them alike, and ratios of neighbours stay honest.

In: functions by name. Out: per function its seconds, one a round, and of two of them the median ratio with its 95% interval.

    turns = take_turns({"model": eager, "program": emitted}, rounds=30)
    ratio = ratio_of(turns["model"].wall, turns["program"].wall)      # above 1: the second is faster

Across processes the ranks meet at a barrier before each turn, and a turn takes what its slowest rank takes (`of_all_ranks`).
On a machine that others use as well, CPU time is the steadier of the two: wall time then contains waits for a core. On a GPU
only wall time says anything, and only with `sync`: a host that waits for it spins.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch.distributed as dist


class Turns(NamedTuple):
    """Seconds per call of every turn, of wall and of CPU time (of the whole process: all its threads)."""

    wall: list[float]
    cpu: list[float]


class Interval(NamedTuple):
    """A median, and the order statistics that enclose that of the distribution in at least 95 of 100 samples."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f})"


def interval(values: Sequence[float]) -> Interval:
    """Median and 95% interval by order statistics: binomial, no assumption on the distribution. Six values at least."""
    ordered, n = sorted(values), len(values)
    rank, outside = 0, 1 / 2**n
    while 2 * (outside + math.comb(n, rank + 1) / 2**n) <= 0.05:
        rank += 1
        outside += math.comb(n, rank) / 2**n
    return Interval(statistics.median(ordered), ordered[rank], ordered[n - 1 - rank])


def ratio_of(these: Sequence[float], those: Sequence[float]) -> Interval:
    """The ratio these / those, turn by turn: median and interval."""
    return interval([a / b for a, b in zip(these, those, strict=True)])


def take_turns(
    runs: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    calls: int = 1,
    seconds: float = math.inf,
    fewest: int = 15,
    warm_up: int = 3,
    sync: Callable[[], object] = lambda: None,
) -> dict[str, Turns]:
    """Call every function `calls` times a turn, in an order drawn anew for each round, the same one in all processes.

    After `seconds` it stops, once `fewest` rounds are over. With a process group all ranks call this alike, and stop together.
    `sync` waits until all that was started is done: before a turn, and at its end.
    """
    for run in runs.values():
        for _ in range(warm_up):
            run()
    turns = {name: Turns([], []) for name in runs}
    start = time.perf_counter()
    for number in range(rounds):
        for name in random.Random(number).sample(list(runs), len(runs)):
            _meet()
            sync()
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(calls):
                runs[name]()
            sync()
            turns[name].wall.append((time.perf_counter() - wall) / calls)
            turns[name].cpu.append((time.process_time() - cpu) / calls)
        if number + 1 >= fewest and _agreed(time.perf_counter() - start) > seconds:
            break
    return turns


def of_all_ranks(turns: dict[str, Turns]) -> dict[str, Turns]:
    """Per turn the wall time of the slowest rank and the CPU time of all, on every rank; a collective."""
    everyone: list[dict[str, Turns]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, turns)
    found = {}
    for name in turns:
        walls, cpus = ([getattr(one[name], which) for one in everyone] for which in ("wall", "cpu"))
        found[name] = Turns(list(map(max, zip(*walls, strict=True))), list(map(sum, zip(*cpus, strict=True))))
    return found


def _meet() -> None:
    if _has_peers():
        dist.barrier()


def _has_peers() -> bool:
    return dist.is_initialized() and dist.get_backend() != "fake"


def _agreed(seconds: float) -> float:
    """The clock of rank 0, so that all ranks stop in one round."""
    if not _has_peers():
        return seconds
    told = [seconds]
    dist.broadcast_object_list(told, 0)
    return told[0]
