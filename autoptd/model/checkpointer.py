"""Checkpoints of a run, written while it trains: every few steps, and when a signal asks the run to end.

In: a `ParallelModel`, its optimizer, a folder; how often, or "auto" (`pace.py`). Out: `step-00001000` and so
on in the folder, the last `keep` of them; a run that resumes from the last complete one, on any mesh.

    with pm.checkpointer("ckpts", opt, every=500, keep=3, extra={"scheduler": sched}) as ckpt:
        ckpt.resume()
        for batch in loader:
            loss = pm.step(*pm.local_batch(*batch)); opt.step(); opt.zero_grad(); sched.step()
            if not ckpt.step(loss):                   # saved, and asked to end
                break

A save copies the state (on CUDA during the next forward and backward; the optimizer waits for that by
itself), and a thread of each process writes it. What ranks have to agree on, a signal, a failed save, one
under way, travels with the loss of the steps.
"""

from __future__ import annotations

import signal
import statistics
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch

from autoptd.errors import PlanError, RuntimeFault
from autoptd.model.checkpoints import Checkpoints
from autoptd.model.saved_optimizers import Given
from autoptd.runtime.checkpoint.commit import (
    Lock,
    checkpoints,
    damage_of,
    name_of,
    new_token,
    path_of,
    put_aside,
    remove_leftovers,
    step_of,
)
from autoptd.runtime.checkpoint.extra import check_objects, own_state
from autoptd.runtime.checkpoint.manifest import Staged
from autoptd.runtime.checkpoint.pace import checked_pace
from autoptd.runtime.checkpoint.save import WRITER, Job, Writer, replicas_of_states, stage_rank
from autoptd.runtime.checkpoint.stage import Staging
from autoptd.runtime.step.launch import Rank
from autoptd.runtime.world.agree import agree, attempted
from autoptd.runtime.world.flags import Flags, FlagWatch, Signals

Result = TypeVar("Result")
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
# Seconds that a save under way has when the run ends by an exception.
GRACE = 5.0
# A loss this many standard deviations above those before a resume is reported, if there were at least
# MIN_LOSSES.
SPIKE, MIN_LOSSES = 6.0, 5


class Checkpointer:
    """Saves a run while it trains: see the module's docstring. Made by `pm.checkpointer`; all ranks make and
    call it alike.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        compare_copies: Callable[[], None],
        folder: str | Path,
        optimizer: Given,
        *,
        every: int | str,
        mtbf: float | None,
        keep: int | None,
        extra: Mapping[str, Any] | None,
    ) -> None:
        self._pace = checked_pace(every, keep, mtbf, WRITER)
        # Absolute: the process may change its working directory later.
        self._asked, self.folder = str(folder), path_of(folder, WRITER).absolute()
        run = checkpoints.run
        self._checkpoints, self._run, self._clock = checkpoints, run, run.clock
        self._optimizer, self._compare = optimizer, compare_copies
        self._ranks = run.started("checkpointer").unrecorded
        self._own = checkpoints.own(optimizer, WRITER)
        self.every, self.keep, self._extra = every, keep, dict(extra or {})
        self._lock, self._signals = Lock(self.folder), Signals(SIGNALS)
        self._staging = [Staging(rank.world.device) for rank in self._ranks.here]
        # Of the run; each save adds its number.
        self._token, self._count = "", 0
        self._writer: Writer | None = None
        # What the `with` block ends.
        self._open = ExitStack()
        self._is_due = self._told_late = self._told_ahead = False
        # How many more steps it takes until flags tell of the save that was started last.
        self._unseen = 0
        self._seen_step = -1
        # The step that was saved last, and how often the run had been set back by then; None if that failed.
        self._saved: tuple[int, int] | None = None
        # Those before a resume, until the first loss after it.
        self._losses_before: list[float] = []

    def __enter__(self) -> Checkpointer:
        self._all("start", self._begin)
        first = self._ranks.here[0].world
        for rank in self._ranks.here:
            rank.world.flags = FlagWatch(partial(self._flags, rank.world.rank == 0), rank.world.device)
        processes = first.mesh.size if self._run.is_process else 1
        self._writer = Writer(
            first.mailbox(f"checkpoints {self._token}"), first.rank, first.mesh.size, processes
        )
        self._signals.open()
        if not self._signals.is_open:
            self._say("signals are not taken: Python gives them to the main thread only")
        for made in () if self._own is None else self._own.made:
            self._open.callback(made.register_step_pre_hook(lambda *_: self.release()).remove)
        self._open.enter_context(self._run.on_overwrite(self.release))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, _: TracebackType | None
    ) -> None:
        try:
            if exc is None:
                self._wait()
                # One that had to wait is made now, if the loop ended right after a call of `step`.
                if self._is_due and self._seen_step == self._clock.steps:
                    self.save()
            elif self._signals.seen is not None and "DataLoader worker" in str(exc):
                exc.add_note("a signal ended it: give the DataLoader worker_init_fn=autoptd.ignore_signals")
        finally:
            self._writer_here.close(0.0 if exc is None else GRACE)
            self._writer = None
            self._signals.close()
            for rank in self._ranks.here:
                rank.world.flags = None
            self._open.close()
            self._lock.free()

    def release(self) -> None:
        """Finish copying, so that the caller may change parameters and moments."""
        for staging in self._staging:
            staging.release()

    @property
    def is_stopping(self) -> bool:
        """Whether a rank was asked to end, as all ranks know since the last step or evaluation."""
        return self._known.stop

    def resume(self) -> Path | None:
        """Load the last complete checkpoint of the folder; return it, None where there is none. Collective.

        If its files were damaged, it is put aside, and the one before is taken; a line on stderr says so.
        RuntimeFault where all are damaged, PlanError where the model is another one.
        """
        self._wait()
        found = self._from_rank_0("look for checkpoints", self._candidates)
        damaged: list[str] = []
        for path in found:
            fault = self._from_rank_0("check", partial(damage_of, path)) or self._load(path)
            if not fault:
                self._put_aside(found[: len(damaged)], damaged)
                self._losses_before = [float(loss) for loss in self._clock.losses]
                self._say(f"resumed from {path}, after step {self._clock.steps}")
                return path
            damaged.append(fault)
        if damaged:
            fact = f"no checkpoint of {str(self.folder)!r} is whole: {'; '.join(damaged)}"
            raise RuntimeFault(WRITER, fact, "use a new folder, or restore the files from a backup")
        return None

    def step(self, loss: torch.Tensor | float | None = None) -> bool:
        """Note that a step is over, optimizer and schedulers included; save when it is time. Collective.

        Returns False once a rank was signalled (SIGTERM, SIGUSR1) and the state is saved: the loop should
        end. `loss` is compared with those before a resume. RuntimeFault on all ranks where a save has failed.
        """
        if self._losses_before and loss is not None:
            self._look_at(float(loss))
        self._pace.observe(self._writer_here.is_busy)  # PlanError outside of the block
        self._say(self._pace.news())
        known = self._known
        self._seen_step = now = self._clock.steps
        if known.failed:
            self._raise_failed()
        if known.stop:
            self.save()
            self._say(f"asked to end by a signal: saved {self.folder / name_of(now)}")
            return False
        self._unseen = max(0, self._unseen - 1)
        # Flags that were set before the last save are about that one.
        is_due = self._pace.is_due(now, known.due and not self._unseen)
        self._is_due |= is_due and self._saved != (now, self._clock.jumps)
        if self._is_due and not self._is_busy(known):
            self._start()
        elif self._is_due and not self._told_late:
            self._told_late = True
            self._say(
                f"a save is still being written when the next one is due, at step {now}: it waits for that"
            )
        return True

    def save(self) -> Path:
        """Save now, and return the checkpoint when it is complete. Collective.

        Also where this step was saved before: parameters may have been changed since.
        """
        self._wait()
        self._start()
        self._wait()
        self._pace.forget()
        return self.folder / name_of(self._clock.steps)

    # a save

    def _start(self) -> None:
        """Copy the state, and let the thread write it."""
        self._warn_of_later_ones()
        self._ranks.follow_edits()
        self._checkpoints.warn_of_gradients(WRITER, "no checkpoint has them: save after optimizer.step()")
        # Where saves are rarer than comparisons, one more is nothing: no replica's lost bit is saved.
        step, before = self._clock.steps, 0 if self._saved is None else self._saved[0]
        if 0 < self._run.options.ranks.check_every <= self._pace.gap(step, before):
            self._compare()
        self._is_due = False
        self._pace.begin()
        self._count += 1
        contents = self._checkpoints.contents(self._own)
        staged: dict[int, Staged] = {}

        def run(rank: Rank) -> None:
            index = self._ranks.here.index(rank)
            staging = self._staging[index]
            staging.begin()
            staged[index] = stage_rank(rank.params, contents, staging)
            staging.seal()

        self._ranks.run(WRITER, run)
        first = self._ranks.here[0].world
        mesh = first.mesh
        replicas = replicas_of_states(mesh) if self._run.is_process else {0: 0}
        job = Job(
            folder=self.folder / name_of(step),
            token=f"{self._token}-{self._count}",
            staged=tuple(staged.values()),
            staging=self._staging,
            contents=contents,
            # Asked now. A failure on this process alone reaches all ranks, like any failure in a save.
            state=attempted(partial(own_state, self._extra, first.device)),
            replicas=replicas,
            losses=tuple(self._clock.losses),
            keep=self.keep,
        )
        self._saved = (step, self._clock.jumps)
        # The flags of the next step report it; where they are known a step late, those of the step after.
        flags = first.flags
        self._unseen = 2 if flags is not None and flags.is_late else 1
        self._writer_here.start(job)

    def _wait(self) -> None:
        """Wait for the save under way; RuntimeFault on all ranks if it failed."""
        self._writer_here.wait(self._run.options.ranks.timeout)
        if error := self._writer_here.take_error():
            self._saved = None
            raise failed_fault(error)

    def _raise_failed(self) -> None:
        """Raise what failed on all ranks; some may still be in the save."""
        self._saved = None
        self._writer_here.wait(self._run.options.ranks.timeout)
        own = self._writer_here.take_error()
        texts = self._all("failed save", lambda rank: rank.world.everyone().gather_objects(own, WRITER))
        raise failed_fault(next((text for text in texts if text), "no rank says why"))

    def _is_busy(self, known: Flags) -> bool:
        """Tell, on all ranks alike, whether a save may be under way on one of them."""
        return known.busy or self._unseen > 0

    def _flags(self, decides: bool) -> Flags:
        """What a rank of this process has to tell; one rank of all `decides` when a save is due."""
        writer, due = self._writer_here, decides and self._pace.wants
        return Flags(self._signals.seen is not None, writer.has_failed, writer.is_busy, due)

    @property
    def _known(self) -> Flags:
        flags = self._ranks.here[0].world.flags
        return Flags() if flags is None else flags.known

    @property
    def _writer_here(self) -> Writer:
        if self._writer is None:
            raise PlanError(WRITER, "is not open", "with pm.checkpointer(...) as ckpt:")
        return self._writer

    # starting, resuming

    def _begin(self, rank: Rank) -> None:
        """Agree on a folder, and lock it."""
        world, asked = rank.world, (self._asked, self.every, self._pace.mtbf, self.keep, sorted(self._extra))
        gathered = world.everyone().gather_objects((asked, new_token()), WRITER)

        def check() -> None:
            if world.flags is not None:
                raise PlanError(WRITER, "another one of this model is open", "one checkpointer at a time")
            if asked != gathered[0][0]:
                fact = f"was asked for {asked}, and rank 0 for {gathered[0][0]}"
                raise PlanError(WRITER, fact, "the same folder, every=, mtbf=, keep= and extra= on all ranks")
            # Their states are not asked for yet: torchdata's loader begins its epoch when it is asked.
            check_objects(self._extra)
            if world.rank == 0:
                self._lock.take()

        try:
            agree(world, WRITER, check)
        except BaseException:
            self._lock.free()
            raise
        self._token = gathered[0][1]

    def _candidates(self) -> list[Path]:
        if left := remove_leftovers(self.folder):
            self._say(f"what earlier runs left could not be removed: {', '.join(left)}")
        return checkpoints(self.folder)

    def _load(self, path: Path) -> str:
        """Load a checkpoint; return how it is damaged, "" if it is not."""
        try:
            self._checkpoints.load(path, optimizer=self._optimizer, extra=self._extra)
        # Bytes of tensors are checked while they are read. A wrong request is a PlanError.
        except RuntimeFault as fault:
            return f"{fault.site}: {fault.fact}"
        return ""

    def _put_aside(self, paths: list[Path], reasons: list[str]) -> None:
        for path, reason in zip(paths, reasons, strict=True):
            aside = self._from_rank_0("put aside", partial(put_aside, path, self._token))
            self._say(
                f"{path.name} is damaged ({reason}): it is now {aside.name}, and the one before is taken"
            )

    def _warn_of_later_ones(self) -> None:
        """Warn once where the folder has checkpoints of later steps: a resume would take those."""
        if self._told_ahead or not self._ranks.has_rank_0:
            return
        self._told_ahead = True
        if self._own is not None:
            self._own.warn_of_others(self._run.optimizers.values(), self._extra.values())
        later = [path for path in checkpoints(self.folder) if step_of(path) > self._clock.steps]
        if later:
            fact = f"{self.folder} has {later[0].name}, which resume() would take, and this run saves step {self._clock.steps}"
            warnings.warn(
                f"{fact}: call resume(), remove unwanted checkpoints, or use another folder", stacklevel=4
            )

    def _look_at(self, loss: float) -> None:
        """Warn if the first loss after a resume is far above those before."""
        before, self._losses_before = self._losses_before, []
        if len(before) < MIN_LOSSES:
            return
        usual, spread = statistics.fmean(before), statistics.pstdev(before)
        if loss > usual + SPIKE * max(spread, 1e-6 * abs(usual)):
            self._say(
                f"the first loss is {loss:.4g}; before the checkpoint it was {usual:.4g}: are the data the same?"
            )

    def _all(self, what: str, fn: Callable[[Rank], Result]) -> Result:
        return self._ranks.run(f"{WRITER}: {what}", fn)

    def _from_rank_0(self, what: str, act: Callable[[], Result]) -> Result:
        """Return on all ranks what `act` returns on rank 0, or raise what it raises there."""

        def run(rank: Rank) -> Any:
            found = agree(rank.world, WRITER, lambda: act() if rank.world.rank == 0 else None)
            return rank.world.everyone().gather_objects(found, WRITER)[0]

        return self._all(what, run)  # type: ignore[no-any-return]

    def _say(self, text: str) -> None:
        if text and self._ranks.has_rank_0:
            print(f"autoptd: {text}", file=sys.stderr, flush=True)


def failed_fault(error: str) -> RuntimeFault:
    remedy = "fix the cause, and save again; earlier checkpoints are unchanged"
    return RuntimeFault(WRITER, f"a save failed: {error}", remedy)
