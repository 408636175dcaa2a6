"""Save a checkpoint: all ranks at once (`pm.save`), or a thread of each process while training continues
(`Writer`).

In: a description of the run (`Contents`), and each rank's parameters, or what it has staged. Out: a committed
folder, or the same error on all ranks. Training has to pause only for the first of three functions:

    staged = stage_rank(params, contents, copy)       # on the rank's thread: copies the current tensors
    write_rank(part, staged, objects)                 # any thread: files, and a report for the rank that commits
    commit(part, folder, ranks, contents, extra)      # any thread of rank 0, after all reports are there

They communicate through the folder alone. `save_rank` adds the collectives by which ranks agree, one after
each of them. Writers agree through a mailbox instead, and make no collective: the process with rank 0 makes
the folder, waits until all have ended their shares, and commits.

    writer = Writer(world.mailbox("checkpoints"), rank, size, processes=8)
    writer.start(job)
    ...                                              # steps; `is_busy`
    writer.wait(limit=300.0)                         # seconds without any progress
    if (error := writer.take_error()): ...
"""

from __future__ import annotations

import atexit
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread, get_native_id
from typing import Any

import torch

from autoptd.errors import PlanError, RuntimeFault
from autoptd.ir.mesh import Mesh
from autoptd.ir.scopes import paused_collection
from autoptd.runtime.checkpoint.commit import (
    begin,
    finish,
    new_token,
    part_of,
    path_of,
    prune,
    report_file,
    sweep,
)
from autoptd.runtime.checkpoint.extra import merged
from autoptd.runtime.checkpoint.manifest import Staged, StagedTensor
from autoptd.runtime.checkpoint.stage import Copy, Homes, OptimizerState, Staging, shown, stage, write_rank
from autoptd.runtime.folders.disk import remove_file, remove_folder, write_file
from autoptd.runtime.params.parameters import RankParameters
from autoptd.runtime.world.agree import agree
from autoptd.runtime.world.world import Mailbox, World

SITE, WRITER = "pm.save", "pm.checkpointer"
# Seconds between two looks into the mailbox.
BETWEEN = 0.02
# Seconds after which a shared file system shows a file that another node has written.
LATE_FILES = 30.0
# Seconds that rank 0 waits for others to read that a save is complete.
LATE_READERS = 10.0
# The smallest share of a core that others want as well (1.4%): it uses the time that steps leave idle.
NICENESS = 19
# Seconds that a process waits for its thread when it ends.
END = 2.0


@dataclass(frozen=True)
class Contents:
    """The content of a checkpoint besides parameters: the description of the run, optimizer settings,
    buffers, optimizer state.

    `names` maps the first name of each tied parameter to all its names.
    """

    about: Mapping[str, Any]
    names: Mapping[str, Sequence[str]] = field(default_factory=dict)
    objects: Mapping[str, Any] = field(default_factory=dict)
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)
    state: OptimizerState | None = None
    # By rank, the parameters that optimizers step as a whole; their tensors where these are at home.
    homes: Mapping[int, Homes] = field(default_factory=dict)

    def with_losses(self, losses: Iterable[torch.Tensor]) -> Contents:
        """Return the contents with the last losses; this waits for the device."""
        return replace(self, about={**self.about, "losses": [float(loss) for loss in losses]})


def stage_rank(params: RankParameters, contents: Contents, copy: Copy = shown) -> Staged:
    """Collect what a rank writes; rank 0 writes the buffers."""
    staged = stage(params, contents.state, copy, contents.homes.get(params.world.rank, {}))
    if params.world.rank == 0:
        for name, x in contents.buffers.items():
            staged.tensors.append(StagedTensor.whole(name, "", copy(x.detach())))
    return staged


def commit(part: Path, folder: Path, ranks: Sequence[int], contents: Contents, extra: bytes) -> list[str]:
    """Make the folder a checkpoint after `ranks` have left their reports; then remove leftovers of earlier
    saves.

    Return those that cannot be removed: the checkpoint is complete in any case.
    """
    with paused_collection():
        finish(part, folder, ranks, contents.about, contents.names, extra)
    return sweep(folder)


def text_of_left(folder: Path, left: Sequence[str]) -> str:
    """Report that a save has succeeded, but could not remove some files."""
    return f"{folder} is saved and complete; old files could not be removed: {', '.join(left)}"


def save_rank(
    params: RankParameters, where: str | Path, prepare: Callable[[], tuple[Contents, bytes | None]]
) -> None:
    """Save; a collective of all ranks. `prepare` returns the contents, and this process's part of `extra.pt`,
    if any.
    """
    world, folder = params.world, path_of(where, SITE)
    token, first = world.everyone().gather_objects((new_token(), str(folder)), SITE)[0]

    def prepared() -> tuple[Contents, bytes | None]:
        if str(folder) != first:
            raise PlanError(
                SITE, f"got the folder {str(folder)!r}, and rank 0 {first!r}", "one folder for all"
            )
        return prepare()

    contents, own = agree(world, SITE, prepared)
    part = part_of(folder, token)
    agree(world, SITE, lambda: begin(folder, token) if world.rank == 0 else None)
    try:
        agree(world, SITE, lambda: _write(part, params, contents))
        _commit_all(world, part, folder, contents, own)
    except BaseException:
        # No rank is still writing: all of them took part in the failed call.
        if world.rank == 0:
            # A second failure would hide the first; the next save removes the rest.
            with suppress(OSError):
                remove_folder(part)
        raise


def _commit_all(world: World, part: Path, folder: Path, contents: Contents, own: bytes | None) -> None:
    """Let rank 0 commit with the states of all processes; a collective."""
    replicas = replicas_of_states(world.mesh)
    states = world.everyone().gather_objects(own, SITE)
    found = [(data, replicas[rank]) for rank, data in enumerate(states) if data is not None]

    def act() -> None:
        if world.rank == 0:
            extra = merged([data for data, _ in found], [replica for _, replica in found])
            if left := commit(part, folder, range(world.mesh.size), contents, extra):
                warnings.warn(f"{SITE}: {text_of_left(folder, left)}", stacklevel=2)

    agree(world, SITE, act)


def replicas_of_states(mesh: Mesh) -> dict[int, int]:
    """Return for each rank the replica whose extra states it provides, -1 if another rank provides them."""
    others = (*mesh.value_axes, *mesh.stage_axes)
    found = {}
    for rank in range(mesh.size):
        coordinate = mesh.coordinate(rank)
        leads = not any(coordinate[axis] for axis in others)
        found[rank] = mesh.replica_of(rank) if leads else -1
    return found


def _write(part: Path, params: RankParameters, contents: Contents) -> None:
    if not part.is_dir():
        fact = f"rank 0 has made {str(part)!r}, which does not exist here"
        raise PlanError(SITE, fact, "a folder that all nodes share")
    write_share(part, stage_rank(params, contents), contents)


def write_share(part: Path, staged: Staged, contents: Contents) -> None:
    write_rank(part, staged, contents.objects if staged.rank == 0 else {})


@dataclass
class Job:
    """One save into `folder`, through `.part-<token>`.

    `state` returns this process's part of `extra.pt`; if it raises, the save fails on all processes.
    `replicas` is as `replicas_of_states` returns it.
    """

    folder: Path
    token: str
    staged: Sequence[Staged]
    staging: Sequence[Staging]
    contents: Contents
    state: Callable[[], bytes]
    replicas: dict[int, int]
    losses: Sequence[torch.Tensor] = ()
    keep: int | None = None

    @property
    def part(self) -> Path:
        return part_of(self.folder, self.token)

    def key(self, what: str) -> str:
        return f"{self.part.name} {what}"


class Abandoned(Exception):
    """The run ends before the save is complete."""


@dataclass
class Writer:
    """The thread of a process that writes checkpoints; `rank` is one of `size` ranks in `processes`
    processes.
    """

    box: Mailbox
    rank: int
    size: int
    processes: int
    is_busy: bool = False
    _error: str = ""
    _has_warned: bool = False
    # Whether `wait` gave up, and the ranks that were missing, if the store knows them.
    _is_late: bool = False
    _missing: str = "another rank is gone, or the store does not answer"
    _jobs: SimpleQueue[Job | None] = field(default_factory=SimpleQueue)
    _idle: Event = field(default_factory=Event)
    _over: Event = field(default_factory=Event)
    # The time of the last progress that was seen; infinite while this process writes.
    _progress: float = 0.0

    def __post_init__(self) -> None:
        self._idle.set()
        self._thread = Thread(target=self._serve, name="checkpoints", daemon=True)
        self._thread.start()
        # A thread in the store's C++ code at the end of the interpreter aborts the process.
        atexit.register(self.close)

    @property
    def has_failed(self) -> bool:
        return bool(self._error)

    def take_error(self) -> str:
        """Return the error of the last save, once; "" if it succeeded."""
        error, self._error = self._error, ""
        return error

    def start(self, job: Job) -> None:
        """Start a save, after `wait`."""
        self.is_busy, self._progress = True, time.monotonic()
        self._idle.clear()
        self._jobs.put(job)

    def wait(self, limit: float) -> None:
        """Wait for the current save; RuntimeFault after `limit` seconds without progress."""
        while not self._idle.wait(BETWEEN):
            if time.monotonic() - self._progress > limit:
                self._is_late = True
                self.close()
                fact = f"a save made no progress for {limit:g} s: {self._missing}"
                raise RuntimeFault(
                    WRITER, fact, "look at the output of the other ranks, or increase RankOptions(timeout=)"
                )

    def close(self, patience: float = 0.0) -> None:
        """End the thread; a pending save has `patience` seconds to finish."""
        atexit.unregister(self.close)
        self._idle.wait(patience)
        self._over.set()
        self._jobs.put(None)
        self._thread.join(timeout=END)

    def _serve(self) -> None:
        _give_way()
        while (job := self._jobs.get()) is not None:
            try:
                self._error = self._save(job)
            except Abandoned:
                self._error = "the run ended before it was complete"
                if self._is_late:
                    self._missing = self._who_is_missing(job)
            except Exception as exc:
                # The store does not answer.
                self._error = f"rank {self.rank}: {type(exc).__name__}: {exc}"
            # Only its buffers are kept for the next one.
            del job
            self.is_busy = False
            self._idle.set()

    def _save(self, job: Job) -> str:
        """Write this process's share, and let rank 0 commit; return the error, "" if the save succeeded."""
        try:
            self._write(job)
        except Abandoned:
            raise
        except Exception as exc:
            self.box.put(job.key("error"), f"rank {self.rank}: {exc or type(exc).__name__}")
        self._progress = time.monotonic()
        self.box.put(job.key(f"ended {self.rank}"), "")
        self.box.add(job.key("ended"))
        if self.rank == 0:
            outcome = self._lead(job)
            self.box.put(job.key("outcome"), outcome)
            self._await_readers(job)
            return outcome
        outcome = self._await(lambda: self.box.get(job.key("outcome")))
        # Rank 0 may have ended before it answers.
        with suppress(RuntimeError):
            self.box.add(job.key("read"))
        return outcome

    def _write(self, job: Job) -> None:
        for staging in job.staging:
            staging.ready()
        if self.rank == 0:
            begin(job.folder, job.token)
            self.box.put(job.key("begun"), "")
        elif self._await(lambda: self._begun(job)):
            return
        self._await_files(job, [job.part], "made by rank 0")
        self._progress = float("inf")
        state = job.state()
        for staged in job.staged:
            write_share(job.part, staged, job.contents)
        write_file(job.part / _state_file(self.rank), state)

    def _begun(self, job: Job) -> str | None:
        """Return "" once the folder exists, the error if it cannot be made, None before."""
        begun = self.box.get(job.key("begun"))
        return self.box.get(job.key("error")) if begun is None else begun

    def _lead(self, job: Job) -> str:
        """Commit after all processes have ended their shares; return the error, "" if that succeeded."""
        ended = 0
        while (now := self.box.count(job.key("ended"))) < self.processes:
            if now > ended:
                ended, self._progress = now, time.monotonic()
            self._pause()
        self._progress = float("inf")
        error = self.box.get(job.key("error")) or ""
        try:
            if not error:
                self._commit(job)
        except Abandoned:
            raise
        except Exception as exc:
            error = f"rank 0: {exc or type(exc).__name__}"
        if error:
            # No process is still writing into it.
            with suppress(OSError):
                remove_folder(job.part)
        return error

    def _await_readers(self, job: Job) -> None:
        """Wait briefly until all processes have read the outcome.

        Rank 0 may host the store; if it exits after this save, the others would report a failure of a
        checkpoint that is complete.
        """
        deadline = time.monotonic() + LATE_READERS
        with suppress(Abandoned):
            while self.box.count(job.key("read")) < self.processes - 1 and time.monotonic() < deadline:
                self._pause()

    def _who_is_missing(self, job: Job) -> str:
        ranks = [rank for rank in range(self.processes) if self.box.get(job.key(f"ended {rank}")) is None]
        if self._begun(job) is None:
            # The others are waiting for it.
            ranks = [0]
        if not ranks:
            return "all ranks have written their parts, and rank 0 has not committed"
        return f"rank {', '.join(map(str, ranks))} has not written its part: all ranks have to call save"

    def _commit(self, job: Job) -> None:
        files = [job.part / report_file(rank) for rank in range(self.size)]
        files += [job.part / _state_file(rank) for rank in job.replicas]
        self._await_files(job, files, "written by other ranks")
        states = []
        for rank in job.replicas:
            states.append((job.part / _state_file(rank)).read_bytes())
            remove_file(job.part / _state_file(rank))
        contents = job.contents.with_losses(job.losses)
        extra = merged(states, list(job.replicas.values()))
        left = commit(job.part, job.folder, range(self.size), contents, extra)
        left += prune(job.folder.parent, job.keep, job.folder, job.token)
        if left and not self._has_warned:
            # The save has succeeded, and the run goes on.
            self._has_warned = True
            print(f"autoptd: {text_of_left(job.folder, left)}", file=sys.stderr, flush=True)

    def _await_files(self, job: Job, paths: Sequence[Path], what: str) -> None:
        """Wait until files of other processes are visible; RuntimeFault that names the missing ones."""
        deadline = time.monotonic() + LATE_FILES
        while missing := [path.name for path in paths if not path.exists()]:
            if time.monotonic() > deadline:
                fact = f"{', '.join(missing[:4])} was {what}, and is not in {str(job.folder.parent)!r} here"
                raise RuntimeFault(WRITER, fact, "a folder that all nodes share")
            self._pause()

    def _await(self, ask: Callable[[], str | None]) -> str:
        while (answer := ask()) is None:
            self._pause()
        return answer

    def _pause(self) -> None:
        if self._over.wait(BETWEEN):
            raise Abandoned


def _give_way() -> None:
    """Give other threads of the machine priority: on Linux, each thread has its own niceness.

    On a CPU, training uses all cores, and steps would stall for the seconds of the write.
    """
    if sys.platform == "linux":
        thread = get_native_id()
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, max(NICENESS, os.getpriority(os.PRIO_PROCESS, thread)))


def _state_file(rank: int) -> str:
    return f"state-{rank}.pt"
