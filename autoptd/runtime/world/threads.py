"""Ranks as threads of this process: any mesh on one machine, for notebooks, debugging and most tests.

In: a mesh, the `Communicators` of a program. Out: a `ThreadWorld` with one `World` per rank, and `Ranks`, the threads
that run a function on all of them. How the threads' calls meet, and that this world also checks the order of
collectives, is in `exchange.py`.

    shared = ThreadWorld(Mesh(t=2), Communicators())
    run_ranks(shared, lambda world: world.group(("tp",)).all_reduce(torch.ones(2), "sum"))

When a rank raises, that exception is the *first fault*: the waiting ranks are released with `Aborted`, which
is never shown.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, NoReturn, TypeVar

import torch

from autoptd.errors import AutoptdError, RuntimeFault
from autoptd.ir.mesh import Mesh
from autoptd.runtime.world.devices import thread_device
from autoptd.runtime.world.exchange import Meeting, Shared, ThreadGroup, ThreadRank
from autoptd.runtime.world.pipes import Pipe, ThreadChannel
from autoptd.runtime.world.world import Communicators, World, fault_site, on_device

Result = TypeVar("Result")
# Seconds that the other ranks get to end after a fault.
GRACE = 10.0
# Seconds between two looks at signals: one that another thread receives does not wake up the main thread.
LISTENS = 0.5
REMEDY = "call parallelize again, and pm.load a checkpoint"


class ThreadWorld(Shared):
    """What the rank threads share; `worlds[rank]` is the World of one rank."""

    def __init__(
        self,
        mesh: Mesh,
        communicators: Communicators | None = None,
        device: str = "cpu",
        timeout: float = 300.0,
    ) -> None:
        super().__init__(mesh, timeout)
        communicators = communicators or Communicators()
        meetings = {ranks: Meeting(self, ranks) for ranks in communicators.groups(mesh)}
        pipes = {link: Pipe(self, *link) for link in communicators.channels(mesh)}
        self._parts: list[Meeting | Pipe] = [*meetings.values(), *pipes.values()]
        place = thread_device(device)
        self.worlds = [ThreadRank(self, rank, place) for rank in range(mesh.size)]
        for ranks, meeting in meetings.items():
            for index, rank in enumerate(ranks):
                self.worlds[rank].groups_here[ranks] = ThreadGroup(self.worlds[rank], meeting, index)
        for (source, target), pipe in pipes.items():
            self.worlds[source].channels_out[target] = ThreadChannel(self.worlds[source], pipe)
            self.worlds[target].channels_in[source] = ThreadChannel(self.worlds[target], pipe)

    def reset(self) -> None:
        """Forget a fault and all half-finished calls; no rank may be running."""
        self.fault = None
        self.forget_order()
        self._waiting.clear()
        for part in self._parts:
            part.clear()


class Ranks:
    """One thread per rank, kept for many `run`s (steps).

    After a fault the pool can be used again if every rank ended; a rank that hangs cannot be stopped, so the
    pool is then broken and raises. A single rank never waits, and runs in the calling thread.
    """

    def __init__(self, shared: ThreadWorld) -> None:
        self.shared = shared
        self._stuck: list[int] = []
        # A queue of functions to each thread (None ends it), and one back with (rank, result).
        self._jobs: list[SimpleQueue[Any]] = [SimpleQueue() for _ in shared.worlds]
        self._ended: SimpleQueue[tuple[int, Any]] = SimpleQueue()
        if len(shared.worlds) > 1:
            for world, jobs in zip(shared.worlds, self._jobs, strict=True):
                name, args = f"rank {world.rank}", (world, jobs, self._ended)
                threading.Thread(target=_serve, args=args, name=name, daemon=True).start()
        # Ends the threads with the pool, at the latest; the callback must not refer to the pool itself.
        self._end = weakref.finalize(self, _end, self._jobs)

    def run(self, fn: Callable[[World], Result]) -> list[Result]:
        """Call `fn(world)` on every rank; return the results in rank order, or raise the first fault."""
        if not self._end.alive:
            raise RuntimeFault("ranks as threads", "pm.close() has ended them", REMEDY)
        if self._stuck:
            raise RuntimeFault(
                "ranks as threads",
                f"ranks {self._stuck} still hang after an earlier fault",
                REMEDY,
            )
        if len(self._jobs) == 1:
            return [self._run_alone(fn)]
        results: dict[int, Any] = {}
        try:
            for jobs in self._jobs:
                jobs.put(fn)
            self._collect(results)
        # KeyboardInterrupt in the caller: stop the ranks as well.
        except BaseException as exc:
            # Rank -1 is the caller: the waiting ranks are released as if a rank had failed.
            self.shared.fail(-1, "run", exc)
            # It may have come before a rank had its job, or as an answer was taken: what they answer to this comes last.
            results.clear()
            for jobs in self._jobs:
                jobs.put(_has_ended)
            self._collect(results, last=_has_ended)
            raise
        finally:
            self._stuck = sorted(set(range(len(self._jobs))) - set(results))
            fault = self.shared.fault
            if fault and not self._stuck:
                self.shared.reset()
        if fault:
            _raise_fault(*fault)
        # Threads would forgive a wrong order, which hangs on NCCL: so every run on threads looks for one.
        self.shared.check_one_order()
        return [results[rank] for rank in range(len(self._jobs))]

    def close(self) -> None:
        """End the threads."""
        self._end()

    def _run_alone(self, fn: Callable[[World], Result]) -> Result:
        (world,) = self.shared.worlds
        try:
            with on_device(world.device):
                return fn(world)
        except BaseException as exc:
            _raise_fault(world.rank, world.at, exc)
        finally:
            self.shared.reset()

    def _collect(self, results: dict[int, Any], last: Any = None) -> None:
        """Wait for every rank, with `last` until it answers that; after a fault, for GRACE seconds at most."""
        deadline = None
        while len(results) < len(self._jobs):
            if self.shared.fault and deadline is None:
                deadline = time.monotonic() + min(GRACE, self.shared.timeout)
            left = LISTENS if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                rank, result = self._ended.get(timeout=left)
            except Empty:
                if deadline is not None:
                    return
                continue
            if last is None or result is last:
                results[rank] = result


def run_ranks(shared: ThreadWorld, fn: Callable[[World], Result]) -> list[Result]:
    """Call `fn(world)` once on every rank, each in its thread.

    Return the results or raise the first fault.
    """
    ranks = Ranks(shared)
    try:
        return ranks.run(fn)
    finally:
        ranks.close()


def _end(all_jobs: list[SimpleQueue[Any]]) -> None:
    for jobs in all_jobs:
        jobs.put(None)


def _has_ended(world: World) -> Any:
    """The job of a rank whose `run` was interrupted."""
    return _has_ended


def _serve(world: ThreadRank, jobs: SimpleQueue[Any], ended: SimpleQueue[tuple[int, Any]]) -> None:
    """Run the jobs of a rank thread until the job is None."""
    while (fn := jobs.get()) is not None:
        result = None
        try:
            # On CUDA all ranks would share autograd's one backward thread, and the first to wait would stop
            # the others.
            with on_device(world.device), torch.autograd.set_multithreading_enabled(False):
                result = fn(world)
        except BaseException as exc:
            world.report_fault(exc)
        # While idle the thread must not keep the step's tensors alive.
        del fn
        ended.put((world.rank, result))
        del result


def _raise_fault(rank: int, at: str, exc: BaseException) -> NoReturn:
    if isinstance(exc, AutoptdError) or not isinstance(exc, Exception):
        raise exc
    raise RuntimeFault(
        fault_site(rank, at), f"{type(exc).__name__}: {exc}", "see the exception above, raised on that rank"
    ) from exc
