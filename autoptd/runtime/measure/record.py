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
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch

from autoptd.ir.actions import parse, phase_of
from autoptd.ir.names import star
from autoptd.program.buckets import GRADIENTS, TIED, UPDATED
from autoptd.program.calls import Call, axis_text, expected_calls
from autoptd.program.program import Program
from autoptd.runtime.checks import batch as check_batch
from autoptd.runtime.checks import copies as check_copies
from autoptd.runtime.checks import sizes as check_sizes
from autoptd.runtime.checks import state as check_state
from autoptd.runtime.measure.work import Counting, Work, sum_work
from autoptd.runtime.step.launch import COMPILING, EDITS, MODEL, Rank, RunningRanks
from autoptd.runtime.step.timeline import Span, Timeline
from autoptd.runtime.world.world import Channel, Group, Pending, World

Result = TypeVar("Result")
Tensor = torch.Tensor
# Sites of collectives that are not part of the program, and therefore not recorded.
CHECKS = (check_batch.SITE, check_copies.SITE, check_sizes.SITE, check_state.SITE)
# Activities of ranks that are not part of a step.
UNRECORDED = (COMPILING, EDITS, MODEL)
# Arguments: kind, ranks of the group, bytes of the payload, site. The call is made in the `with` block.
Note = Callable[[str, Sequence[int], int, str], AbstractContextManager[None]]


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


def cover(
    world: World, note: Note, start: Note | None = None, wait: Note | None = None
) -> Callable[[], None]:
    """Wrap every call of a rank's communicators in a `note`; return the function that undoes this.

    A call that only starts a collective is wrapped in `start`, and its `wait()` in `wait`, where these are given.
    """
    groups, channels = world.communicators()
    covered: list[tuple[Group | Channel, str]] = []
    for group in groups:
        for name, (kind, payload) in GROUP_METHODS.items():
            method = getattr(group, name)
            if "_start" in name:
                wrapped = _noted(method, start or note, wait, kind, group, payload)
            else:
                wrapped = _noted(method, note, None, kind, group, payload)
            # On the instance, in front of the class's method.
            setattr(group, name, wrapped)
            covered.append((group, name))
    for peer, channel in channels.items():
        channel.send = _noted_send(channel.send, note, (world.rank, peer))  # type: ignore[method-assign]
        covered.append((channel, "send"))

    def uncover() -> None:
        for communicator, name in covered:
            # The class's own method shows again.
            delattr(communicator, name)

    return uncover


def _noted(
    method: Callable[..., Any],
    note: Note,
    wait: Note | None,
    kind: str,
    group: Group,
    payload: Callable[[Any, int], int],
) -> Callable[..., Any]:
    def call(data: Any, *args: Any, **kwargs: Any) -> Any:
        # The first string of every collective's arguments.
        site = kwargs["site"] if "site" in kwargs else next(arg for arg in args if isinstance(arg, str))
        if site in CHECKS:
            return method(data, *args, **kwargs)
        about = (kind, group.ranks, payload(data, group.size), site)
        with note(*about):
            result = method(data, *args, **kwargs)
        return result if wait is None else _NotedPending(result, partial(wait, *about))

    return call


class _NotedPending(Pending):
    """A collective under way, whose `wait()` is wrapped in a note."""

    def __init__(self, pending: Pending, note: Callable[[], AbstractContextManager[None]]) -> None:
        self._pending, self._note = pending, note

    def wait(self) -> Any:
        with self._note():
            return self._pending.wait()

    def is_done(self) -> bool:
        return self._pending.is_done()


def _noted_send(method: Callable[..., Any], note: Note, ends: tuple[int, int]) -> Callable[..., Any]:
    def call(tensors: Sequence[Tensor], site: str) -> Any:
        with ExitStack() as stack:
            # The plan counts a call per buffer, and one `send` takes all buffers of a message.
            for x in tensors:
                stack.enter_context(note("send", ends, _nbytes(x), site))
            return method(tensors, site)

    return call


def _place(at: str, site: str) -> tuple[str, int, str]:
    """Return (phase, stage, site) of a call made during the action `at`, in the words of `expected_calls`."""
    name = star(site.removesuffix(" backward"))
    if site.startswith((GRADIENTS, TIED)):
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


def _nbytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


# By method of `Group`: its kind in a record, and its payload in bytes, given a rank's data and the size of the group. The
# payload is the whole value: the result of a gather, the input of a reduce-scatter (`wire_bytes` divides).
GROUP_METHODS: dict[str, tuple[str, Callable[[Any, int], int]]] = {
    "all_reduce": ("all-reduce", lambda x, size: _nbytes(x)),
    "all_reduce_": ("all-reduce", lambda x, size: _nbytes(x)),
    "all_reduce_start": ("all-reduce", lambda x, size: _nbytes(x)),
    "all_gather": ("all-gather", lambda x, size: size * _nbytes(x)),
    "all_gather_start": ("all-gather", lambda x, size: size * _nbytes(x)),
    "all_gather_start_": ("all-gather", lambda flat, size: _nbytes(flat)),
    "reduce_scatter": ("reduce-scatter", lambda x, size: _nbytes(x)),
    "reduce_scatter_start": ("reduce-scatter", lambda x, size: _nbytes(x)),
    "all_to_all": ("all-to-all", lambda parts, size: size * sum(map(_nbytes, parts))),
    "broadcast": ("broadcast", lambda x, size: _nbytes(x)),
    "gather_objects": ("objects", lambda obj, size: 0),
}
