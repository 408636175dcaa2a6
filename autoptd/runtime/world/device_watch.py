"""Abort the host's waits on a hung GPU: NCCL calls do not time out.

A collective on NCCL is queued on a stream, and the host continues. If a peer dies, the stream hangs, and so
does the host at its next synchronization: in the executor, or in the script's `loss.item()`. Neither raises
an error.

In: a rank's `FaultBoard`, and its process groups. Out: nothing, or the first fault on stderr and the groups
aborted, which releases the stream and the host. The main thread then raises the fault at its next call, or
before it returns the results of the step (`FaultBoard.raise_first`). A separate thread does this, in two
cases:

- the board has a first fault, and the main thread does not raise it within GRACE seconds;
- the device has finished nothing for more than `world.timeout` seconds, although it has work queued. A killed
  rank publishes nothing, so this rank makes the diagnosis and publishes it.

The progress of the device is read from *marks*: the executor leaves one after every action. NCCL's watchdog
is the last resort: its timeout is longer than ours by WATCHDOG_MARGIN. (On an error that NCCL itself detects,
such as a lost connection, that watchdog ends the process at once.)

    watch = DeviceWatch(board, world, CudaProbe, abort=lambda: abort_groups(handles, LIMIT))
    watch.mark()                                    # the device has to reach this point in time
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

# Seconds that the main thread has to raise a fault that is on the board.
GRACE = 5.0
# Seconds for the diagnosis, GRACE and the abort.
WATCHDOG_MARGIN = 30.0
# Seconds between two polls of the device.
BETWEEN = 0.25


class Probe(Protocol):
    """A point in the work queued on a device."""

    def record(self) -> None:
        """Record the point after all work queued so far."""

    def is_done(self) -> bool:
        """Return whether the device has reached this point; may be called from any thread."""


class CudaProbe:
    """A point of the current stream."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event()

    def record(self) -> None:
        self._event.record()

    def is_done(self) -> bool:
        try:
            return self._event.query()
        # The device is broken: its next use raises the error.
        except RuntimeError:
            return True


class Mark(NamedTuple):
    """The action that the rank was executing, and its last call, when it left a probe."""

    at: str
    call: Call
    probe: Probe
    made: float


class Marks:
    """The marks that the device has not reached, in order; added by the main thread, read by another."""

    def __init__(self, make_probe: Callable[[], Probe]) -> None:
        self._make_probe = make_probe
        self._lock = Lock()
        self._waiting: deque[Mark] = deque()
        # Destroying an event may block the host.
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
        """Return the next mark, and how long it has been pending; None if less than `seconds`."""
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
    """The thread that watches one rank's device; `abort` ends the pending calls of its process groups."""

    def __init__(
        self, board: FaultBoard, world: World, make_probe: Callable[[], Probe], abort: Callable[[], None]
    ) -> None:
        self._board, self._world, self._abort = board, world, abort
        self._marks = Marks(make_probe)
        self._is_over = Event()
        # The first fault is reported once, however often this thread finds it.
        self._has_told = False
        self._thread = Thread(target=self._serve, name="device watch", daemon=True)
        self._thread.start()
        # Like the board's thread: it must end before the interpreter does.
        atexit.register(self.close)

    def mark(self) -> None:
        """Leave a mark after the work queued on the device so far."""
        if (call := self._board.last_call) is not None and not self._board.is_ended:
            self._marks.add(self._world.at, call)

    def close(self) -> None:
        """End the thread.

        After a fault, abort the groups: destroying them would wait for calls that never complete.
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
        """Return the diagnosis if the device, or a synchronizing call of the host, has waited too long."""
        limit, waiting = self._world.timeout, self._board.waiting()
        if found is not None and found[1] > limit:
            mark, seconds = found
            late = TimeoutError(f"the device has not finished it after {seconds:.0f} s")
            return self._board.diagnose(mark.call, late, mark.at)
        if waiting is not None and waiting[1] > limit and not self._board.is_out:
            return self._board.diagnose(
                waiting[0], TimeoutError(f"has not returned after {waiting[1]:.0f} s")
            )
        return None

    def _comes_out(self) -> bool:
        """Tell whether the main thread raises an exception within GRACE seconds."""
        deadline = time.monotonic() + GRACE
        while time.monotonic() < deadline and not self._board.is_out and not self._is_over.wait(BETWEEN):
            pass
        return self._board.is_out

    def _end_world(self) -> None:
        """Make every later call raise the first fault.

        Work waiting on the device continues, with invalid values.
        """
        if not self._board.is_ended:
            self._board.is_ended = True
            # A process that is exiting cannot start threads.
            with suppress(RuntimeError):
                self._abort()

    def _tell(self, fault: RuntimeFault) -> None:
        if not self._has_told:
            self._has_told = True
            print(f"autoptd: {type(fault).__name__}: {fault}", file=sys.stderr, flush=True)


# The probe for each backend whose calls hang on the device instead of failing.
PROBES: dict[str, Callable[[], Probe]] = {"nccl": CudaProbe}


def abort_groups(groups: Sequence[dist.ProcessGroup], limit: float) -> None:
    """Abort the pending calls of process groups, on a device as well; wait for `limit` seconds at most.

    The groups are aborted in parallel: freeing one communicator may have to wait for the kernels of another,
    which end only when that one is aborted too. On NCCL an abort also stops the watchdog of the group, which
    would end the process.
    """
    threads = [Thread(target=_abort, args=(group,), name="abort", daemon=True) for group in groups]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + limit
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0.0))


def _abort(group: dist.ProcessGroup) -> None:
    # It failed in time, or the group no longer exists.
    with suppress(RuntimeError):
        group.abort()
