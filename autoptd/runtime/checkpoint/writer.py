"""The thread of a process that writes checkpoints while training goes on, and makes them complete.

In: `Job`s, each what the ranks of this process staged. Out: a folder that is complete, or `error` on all processes. They agree
through a mailbox, and make no collective. The process with rank 0 leads: it makes the folder, waits until all have ended their
shares, and commits.

    writer = Writer(world.mailbox("checkpoints"), leads=world.rank == 0, processes=8)
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
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread, get_native_id

import torch

from autoptd.errors import RuntimeFault
from autoptd.runtime.checkpoint.commit import begin, part_of
from autoptd.runtime.checkpoint.extra import merged
from autoptd.runtime.checkpoint.save import Contents, commit, text_of_left, with_losses, write_share
from autoptd.runtime.checkpoint.series import prune
from autoptd.runtime.checkpoint.stage import Staged
from autoptd.runtime.checkpoint.staging import Staging
from autoptd.runtime.checkpoint.write import report_file
from autoptd.runtime.folders.disk import remove_file, remove_folder, write_file
from autoptd.runtime.world.world import Mailbox

SITE = "pm.checkpointer"
# Seconds between two looks into the mailbox.
BETWEEN = 0.02
# Seconds after which a shared file system shows a file that another node has written.
LATE_FILES = 30.0
# Seconds that rank 0 waits for others to read that a save is complete.
LATE_READERS = 10.0
# The least of a core that others want, too: 1.4%. It lives on what steps leave idle.
NICENESS = 19
# Seconds that a process waits for its thread as it ends.
END = 2.0


@dataclass
class Job:
    """One save: into `folder`, by way of `.part-<token>`.

    `state` returns this process's part of `extra.pt`, or raises: then the save fails on all processes.
    `replicas` has for each rank with a state the replica whose extra states count, -1 for none.
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
    """The run ends: the save is not completed."""


@dataclass
class Writer:
    """See the module's docstring; `rank` is one of `size` ranks in `processes` processes."""

    box: Mailbox
    rank: int
    size: int
    processes: int
    is_busy: bool = False
    _error: str = ""
    _told_left: bool = False
    # It was waited for too long; for whom, if the store says it.
    _is_late: bool = False
    _missing: str = "another rank is gone, or the store does not answer"
    _jobs: SimpleQueue[Job | None] = field(default_factory=SimpleQueue)
    _idle: Event = field(default_factory=Event)
    _over: Event = field(default_factory=Event)
    # When anything was last seen to go on; infinite while this process writes.
    _progress: float = 0.0

    def __post_init__(self) -> None:
        self._idle.set()
        self._thread = Thread(target=self._serve, name="checkpoints", daemon=True)
        self._thread.start()
        # A thread that is inside the store's C++ code when the interpreter ends aborts the process.
        atexit.register(self.close)

    @property
    def has_failed(self) -> bool:
        return bool(self._error)

    def take_error(self) -> str:
        """Return why the last save failed, once; "" if it did not."""
        error, self._error = self._error, ""
        return error

    def start(self, job: Job) -> None:
        """Start a save; there is none under way."""
        self.is_busy, self._progress = True, time.monotonic()
        self._idle.clear()
        self._jobs.put(job)

    def wait(self, limit: float) -> None:
        """Wait for the save under way; RuntimeFault where nothing went on for `limit` seconds."""
        while not self._idle.wait(BETWEEN):
            if time.monotonic() - self._progress > limit:
                self._is_late = True
                self.close()
                fact = f"a save has not gone on for {limit:g} s: {self._missing}"
                raise RuntimeFault(
                    SITE, fact, "look at the other ranks' own output, or raise RankOptions(timeout=)"
                )

    def close(self, patience: float = 0.0) -> None:
        """End the thread; a pending save has `patience` seconds to finish."""
        atexit.unregister(self.close)
        self._idle.wait(patience)
        self._over.set()
        self._jobs.put(None)
        self._thread.join(timeout=END)

    def _serve(self) -> None:
        give_way()
        while (job := self._jobs.get()) is not None:
            try:
                self._error = self._save(job)
            except Abandoned:
                self._error = "the run ended before it was complete"
                if self._is_late:
                    self._missing = self._who_is_missing(job)
            except Exception as exc:
                # The store is gone.
                self._error = f"rank {self.rank}: {type(exc).__name__}: {exc}"
            # Buffers are kept; what else the job has is not.
            del job
            self.is_busy = False
            self._idle.set()

    def _save(self, job: Job) -> str:
        """Write this process's share, and let the leading one commit; return why the save failed, "" if it did not."""
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
        # Rank 0 may be gone before it answers.
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
        write_file(job.part / state_file(self.rank), state)

    def _begun(self, job: Job) -> str | None:
        """Return "" once the folder is made, what failed if it cannot be, None before."""
        begun = self.box.get(job.key("begun"))
        return self.box.get(job.key("error")) if begun is None else begun

    def _lead(self, job: Job) -> str:
        """Commit when all have ended their shares; return why not, "" where it is done."""
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
            # No process writes into it any more.
            with suppress(OSError):
                remove_folder(job.part)
        return error

    def _await_readers(self, job: Job) -> None:
        """Wait until all processes have read the outcome: rank 0 may host the store and exit after this save,
        and the others would then report a failure. The wait is short, since the checkpoint is complete in any
        case.
        """
        deadline = time.monotonic() + LATE_READERS
        with suppress(Abandoned):
            while self.box.count(job.key("read")) < self.processes - 1 and time.monotonic() < deadline:
                self._pause()

    def _who_is_missing(self, job: Job) -> str:
        ranks = [rank for rank in range(self.processes) if self.box.get(job.key(f"ended {rank}")) is None]
        if self._begun(job) is None:
            # The others wait for it.
            ranks = [0]
        if not ranks:
            return "all ranks have ended their parts, and rank 0 does not complete it"
        return f"no part of it came from rank {', '.join(map(str, ranks))}: all ranks have to call save"

    def _commit(self, job: Job) -> None:
        files = [job.part / report_file(rank) for rank in range(self.size)]
        files += [job.part / state_file(rank) for rank in job.replicas]
        self._await_files(job, files, "written by other ranks")
        states = []
        for rank in job.replicas:
            states.append((job.part / state_file(rank)).read_bytes())
            remove_file(job.part / state_file(rank))
        contents = with_losses(job.contents, job.losses)
        extra = merged(states, list(job.replicas.values()))
        left = commit(job.part, job.folder, range(self.size), contents, extra)
        left += prune(job.folder.parent, job.keep, job.folder, job.token)
        if left and not self._told_left:
            # The save has succeeded, and the run goes on.
            self._told_left = True
            print(f"autoptd: {text_of_left(job.folder, left)}", file=sys.stderr, flush=True)

    def _await_files(self, job: Job, paths: Sequence[Path], what: str) -> None:
        """Wait until files of others are to be seen; RuntimeFault that names those that are not."""
        deadline = time.monotonic() + LATE_FILES
        while missing := [path.name for path in paths if not path.exists()]:
            if time.monotonic() > deadline:
                fact = f"{', '.join(missing[:4])} was {what}, and is not in {str(job.folder.parent)!r} here"
                raise RuntimeFault(SITE, fact, "a folder that all nodes share")
            self._pause()

    def _await(self, ask: Callable[[], str | None]) -> str:
        while (answer := ask()) is None:
            self._pause()
        return answer

    def _pause(self) -> None:
        if self._over.wait(BETWEEN):
            raise Abandoned


def give_way() -> None:
    """Let other threads have the cores first: Linux has a niceness of each thread.

    Where training takes all cores, as on a CPU, steps would stand still for the seconds of the write.
    """
    if sys.platform == "linux":
        thread = get_native_id()
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, max(NICENESS, os.getpriority(os.PRIO_PROCESS, thread)))


def state_file(rank: int) -> str:
    return f"state-{rank}.pt"


__all__ = ["Job", "Writer"]
