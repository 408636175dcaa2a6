"""Record the collectives, sends and arithmetic that ranks execute while a model runs.

In: the running ranks of this process. Out: a `Record` of `Call`s, comparable with those that the compiler
expects (`program/calls.py`), of `Work` (`work.py`) and of `Span`s (`runtime/step/timeline.py`). A recording
replaces the methods of groups and channels by ones that note the call, and runs steps under a counting mode;
without one there is no overhead.

    with recording(ranks) as (recorded_ranks, record):
        recorded_ranks.run("step", step)
    Counter(record.of(rank=0)) == expected_calls(program, 0)

Receives are the other ends of sends and are not recorded. Python objects that ranks exchange (a dtype, once)
count 0 bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TypeVar

from autoptd.ir.actions import parse, phase_of
from autoptd.ir.names import star
from autoptd.program.buckets import GATHERED, GRADIENTS, TIED, UPDATED
from autoptd.program.calls import Call, axis_text, expected_calls
from autoptd.program.program import Program
from autoptd.runtime.measure.cover import cover
from autoptd.runtime.measure.work import Counting, Work, sum_work
from autoptd.runtime.step.launch import COMPILING, EDITS, MODEL, Rank, RunningRanks
from autoptd.runtime.step.timeline import Span, Timeline

Result = TypeVar("Result")
# Activities of ranks that are not part of a step.
UNRECORDED = (COMPILING, EDITS, MODEL)


class RankRecord:
    """What one rank executed, in order."""

    def __init__(self, rank: Rank) -> None:
        self.rank, self.world = rank, rank.world
        self.calls: list[Call] = []
        self.runs: list[Counting] = []

    def run(self, fn: Callable[[Rank], Result]) -> Result:
        """Call `fn(rank)`, counting what it computes."""
        files: dict[str, Program] = {}
        for executor in self.rank.executors:
            files |= executor.files()
        counting = Counting(files, lambda: self.world.at)
        self.runs.append(counting)
        with counting:
            return fn(self.rank)

    def reasons(self) -> dict[Call, str]:
        """Return why the compiled programs expect each of their calls."""
        reasons: dict[Call, list[str]] = {}
        # Training and evaluation, where these are two programs, and those of other sizes: a recorded call may be of any.
        for executor in self.rank.executors:
            for call in expected_calls(executor.program, self.world.rank, updating=True):
                reasons.setdefault(call, []).append(call.why)
        return {call: "; ".join(dict.fromkeys(why)) for call, why in reasons.items()}

    @contextmanager
    def note(self, kind: str, group_ranks: Sequence[int], payload: int, site: str) -> Iterator[None]:
        """Record one call, made in the `with` block; what the communication itself computes is not this rank's work."""
        world = self.world
        if world.at in UNRECORDED:
            yield
            return
        phase, stage, name = _place(world.at, site)
        axis = axis_text(world.mesh, group_ranks)
        self.calls.append(Call(world.rank, kind, axis, payload, len(group_ranks), phase, stage, name))
        with self.runs[-1].paused() if self.runs else nullcontext():
            yield


class Record:
    """What the ranks of this process executed: all ranks as threads, or its own under torchrun."""

    def __init__(self, ranks: Sequence[Rank], timeline: Timeline) -> None:
        self._ranks = {rank.world.rank: RankRecord(rank) for rank in ranks}
        self.timeline = timeline

    def run(self, rank: Rank, fn: Callable[[Rank], Result]) -> Result:
        """Call `fn(rank)` under record."""
        return self._ranks[rank.world.rank].run(fn)

    @property
    def collectives(self) -> tuple[Call, ...]:
        """All collectives and sends with their reasons: ranks ascending, each rank's in the order of execution."""
        return tuple(call for rank in self._ranks for call in self.of(rank))

    def of(self, rank: int) -> list[Call]:
        """Return the collectives and sends of one rank, in order."""
        reasons = self._ranks[rank].reasons()
        return [replace(call, why=reasons.get(call, "")) for call in self._ranks[rank].calls]

    @property
    def flops(self) -> tuple[Work, ...]:
        """What the ranks computed, by rank, phase, stage and emitted line; see `Work`."""
        return tuple(work for rank in self._ranks for work in self.work_of(rank))

    @property
    def spans(self) -> tuple[Span, ...]:
        """When every action ran: ranks ascending, in order of execution. They include the overhead of counting."""
        return self.timeline.spans

    def work_of(self, rank: int) -> list[Work]:
        """Return what one rank computed."""
        return sum_work(rank, self._ranks[rank].runs)


class RecordingRanks(RunningRanks):
    """Running ranks under record."""

    def __init__(self, ranks: RunningRanks, record: Record) -> None:
        self._ranks, self._record = ranks, record
        self.here, self.replicas = ranks.here, ranks.replicas

    def run(self, what: str, fn: Callable[[Rank], Result]) -> Result:
        return self._ranks.run(what, lambda rank: self._record.run(rank, fn))

    def close(self) -> None:
        self._ranks.close()

    @property
    def unrecorded(self) -> RunningRanks:
        return self._ranks


@contextmanager
def recording(ranks: RunningRanks) -> Iterator[tuple[RecordingRanks, Record]]:
    """Record what `ranks` execute through the ranks that are yielded; no rank may be running at either end."""
    with ranks.timed() as timeline:
        record = Record(ranks.here, timeline)
        covered = [cover(rank.world, rank.note) for rank in record._ranks.values()]
        try:
            yield RecordingRanks(ranks, record), record
        finally:
            for uncover in covered:
                uncover()


def _place(at: str, site: str) -> tuple[str, int, str]:
    """Return (phase, stage, site) of a call made during the action `at`, in the words of `expected_calls`."""
    name = star(site.removesuffix(" backward"))
    if site.startswith((GRADIENTS, TIED, GATHERED)):
        return "step", -1, name
    if site.startswith(UPDATED):
        return "update", -1, name
    if site.startswith("SEND_"):
        action = parse(site)
        name = f"stage {action.stage} to {action.peer}"
    # `at` is "F2.1": ("forward", 2); outside of actions ("step", -1).
    phase, stage = phase_of(at)
    # What backward itself communicates says so: this is a forward line that runs again.
    is_again = phase == "backward" and not site.endswith(" backward") and not site.startswith("SEND_")
    return "recompute" if is_again else phase, stage, name
