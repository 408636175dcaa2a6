"""Ends the host's waits for a device that waits for ever: on NCCL, where calls do not fail.

A collective on NCCL is queued on a stream, and the host goes on. If a peer dies, the stream stands still, and
the host with it wherever it next asks the device for a number: in the executor, or in the script's
`loss.item()`. Nothing fails there.

In: a rank's `FaultBoard`, and its process groups. Out: nothing, or the first fault on stderr, and the groups
aborted, which lets the stream and the host go on. The main thread then raises the fault at its next call, or
before it would hand out what the step made (`FaultBoard.raise_first`). A thread of its own does this, in two
cases:

- the board knows a first fault, and the main thread does not come out by itself within GRACE seconds;
- the device has ended nothing for more than `world.timeout` seconds, though it was given work. A rank that was killed publishes
  nothing; so this rank makes the diagnosis, and publishes it.

What the device has ended is asked by *marks*: the executor leaves one behind every action. The watchdog of
NCCL is the last resort: its timeout is longer than ours by WATCHDOG_MARGIN. (An error that NCCL itself sees,
such as a lost connection, makes that watchdog end the process at once.)

    watch = DeviceWatch(board, world, CudaProbe, abort=lambda: abort_groups(handles, LIMIT))
    watch.mark()                                    # the device is to get here
"""

from __future__ import annotations

import atexit
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Event, Lock, Thread
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

from autoptd.errors import RuntimeFault
from autoptd.runtime.world.faults import BEAT, Call, FaultBoard
from autoptd.runtime.world.world import World, on_device

# Seconds that the main thread has to raise a fault that the board knows.
GRACE = 5.0
# Seconds for the diagnosis, GRACE and the abort.
WATCHDOG_MARGIN = 30.0
# Seconds between two looks at the device.
BETWEEN = 0.25


class Probe(Protocol):
    """A point in what a device was given to do."""

    def record(self) -> None:
        """Put it behind everything that the device was given so far."""

    def is_done(self) -> bool:
        """Return whether the device has come here; any thread may ask."""


class CudaProbe:
    """A point of the current stream."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event()

    def record(self) -> None:
        self._event.record()

    def is_done(self) -> bool:
        try:
            return self._event.query()
        # The device is broken: whoever uses it next will be told.
        except RuntimeError:
            return True


class Mark(NamedTuple):
    """What the rank was executing, and its last call, when it left a probe."""

    at: str
    call: Call
    probe: Probe
    made: float


class Marks:
    """The marks that the device has not reached, in order; left by the main thread, asked by another."""

    def __init__(self, make_probe: Callable[[], Probe]) -> None:
        self._make_probe = make_probe
        self._lock = Lock()
        self._waiting: deque[Mark] = deque()
        # An event that is destroyed may make the host wait.
        self._spare: list[Probe] = []
        # When the device was last seen to reach a mark.
        self._progress = time.monotonic()

    def add(self, at: str, call: Call) -> None:
        with self._lock:
            self._drop_reached()
            probe = self._spare.pop() if self._spare else self._make_probe()
            probe.record()
            self._waiting.append(Mark(at, call, probe, time.monotonic()))

    def late(self, seconds: float) -> tuple[Mark, float] | None:
        """Return the next mark, and for how long the device has not reached it.

        None if that is less than `seconds`.
        """
        with self._lock:
            if self._waiting and self._age() >= seconds:
                self._drop_reached()
            if not self._waiting or self._age() < seconds:
                return None
            return self._waiting[0], self._age()

    def _age(self) -> float:
        return time.monotonic() - max(self._progress, self._waiting[0].made)

    def _drop_reached(self) -> None:
        while self._waiting and self._waiting[0].probe.is_done():
            self._spare.append(self._waiting.popleft().probe)
            self._progress = time.monotonic()


class DeviceWatch:
    """The thread that watches one rank's device; `abort` ends what its process groups have under way."""

    def __init__(
        self, board: FaultBoard, world: World, make_probe: Callable[[], Probe], abort: Callable[[], None]
    ) -> None:
        self._board, self._world, self._abort = board, world, abort
        self._marks = Marks(make_probe)
        self._is_over = Event()
        # The first fault is one, however often this thread comes upon it.
        self._has_told = False
        self._thread = Thread(target=self._serve, name="device watch", daemon=True)
        self._thread.start()
        # Like the board's thread: it must end before the interpreter does.
        atexit.register(self.close)

    def mark(self) -> None:
        """Mark what the device was told to do until now."""
        if (call := self._board.last_call) is not None and not self._board.is_ended:
            self._marks.add(self._world.at, call)

    def close(self) -> None:
        """End the thread.

        If a fault is known the groups are aborted: their own end would wait for what cannot end.
        """
        atexit.unregister(self.close)
        self._is_over.set()
        self._thread.join(timeout=2 * BEAT)
        if self._board.is_known:
            self._end_world()

    def _serve(self) -> None:
        with on_device(self._world.device):
            while not self._is_over.wait(BETWEEN) and not self._board.is_ended:
                self._look()

    def _look(self) -> None:
        board = self._board
        found = self._marks.late(BEAT)
        board.behind = None if found is None else (found[0].at, found[0].call)
        if board.is_known and not board.is_out:
            self._tell(board.first_fault())
            if not self._comes_out():
                self._end_world()
        elif (fault := self._fault_of_wait(found)) is not None:
            self._tell(fault)
            self._end_world()

    def _fault_of_wait(self, found: tuple[Mark, float] | None) -> RuntimeFault | None:
        """The diagnosis, if the device or a call of the host (one that asks the device for numbers) waits for
        too long.
        """
        limit, waiting = self._world.timeout, self._board.waiting()
        if found is not None and found[1] > limit:
            mark, seconds = found
            late = TimeoutError(f"the device has not ended it after {seconds:.0f} s")
            return self._board.diagnose(mark.call, late, mark.at)
        if waiting is not None and waiting[1] > limit and not self._board.is_out:
            return self._board.diagnose(waiting[0], TimeoutError(f"not back after {waiting[1]:.0f} s"))
        return None

    def _comes_out(self) -> bool:
        """Whether the main thread raises something within GRACE seconds."""
        deadline = time.monotonic() + GRACE
        while time.monotonic() < deadline and not self._board.is_out and not self._is_over.wait(BETWEEN):
            pass
        return self._board.is_out

    def _end_world(self) -> None:
        """From here on every call raises the first fault.

        What waits on the device goes on, with wrong numbers.
        """
        if not self._board.is_ended:
            self._board.is_ended = True
            # A process that ends may start no threads.
            with suppress(RuntimeError):
                self._abort()

    def _tell(self, fault: RuntimeFault) -> None:
        if not self._has_told:
            self._has_told = True
            print(f"autoptd: {type(fault).__name__}: {fault}", file=sys.stderr, flush=True)


# How to ask the device, by the backends on which calls do not fail but wait there.
PROBES: dict[str, Callable[[], Probe]] = {"nccl": CudaProbe}


def abort_groups(groups: Sequence[dist.ProcessGroup], limit: float) -> None:
    """End by force what process groups have under way, on a device as well.

    Waits for `limit` seconds at most.

    Side by side: to free one communicator may take the end of another's kernels, which wait until it is
    aborted too. On NCCL an aborted group also tells its watchdog, which would end the process, that nothing
    is left to watch.
    """
    threads = [Thread(target=_abort, args=(group,), name="abort", daemon=True) for group in groups]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + limit
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0.0))


def _abort(group: dist.ProcessGroup) -> None:
    # Not in time, or no longer there.
    with suppress(RuntimeError):
        group.abort()


__all__ = ["PROBES", "WATCHDOG_MARGIN", "CudaProbe", "DeviceWatch", "Mark", "Marks", "Probe", "abort_groups"]
