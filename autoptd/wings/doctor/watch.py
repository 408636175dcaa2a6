"""Threads that speak for a rank whose process is stuck: in a call, or in a request to the store.

In: a world of processes on NCCL, and what to do with a fault. On NCCL a call that hangs blocks its process (a
copy to the host waits for the device), and the watchdog of torch ends it later without naming anybody. So a
second thread asks how long the rank has been in its call, and finds out who is missing. Over gloo every call
ends by itself.

    with watch(world, on_fault=lambda fault: ...):      # called once, in the thread
        world.group(("tp",)).gather_objects(1, "site")
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from autoptd.errors import RuntimeFault
from autoptd.runtime.world.faults import FaultBoard
from autoptd.runtime.world.processes import DistributedWorld
from autoptd.wings.doctor.arrival import Lobby, patiently

# Seconds beyond the timeout in which the rank may notice by itself.
PATIENCE = 9.0
# Seconds between two looks at the rank's call.
BETWEEN = 0.25
# Seconds between two requests to the store.
PROBE = 2.0


@contextmanager
def watch(world: DistributedWorld, on_fault: Callable[[RuntimeFault], None]) -> Iterator[None]:
    """Watch the rank in a `with` block."""
    if world.backend != "nccl":
        yield
        return
    with watching(world.board, world.timeout + PATIENCE, on_fault):
        yield


@contextmanager
def watching(board: FaultBoard, limit: float, on_fault: Callable[[RuntimeFault], None]) -> Iterator[None]:
    """Call `on_fault` once if the rank is in one call for more than `limit` seconds."""
    is_over = threading.Event()

    def serve() -> None:
        while not is_over.wait(min(BETWEEN, limit)):
            found = board.waiting()
            if found is not None and found[1] > limit:
                fault = board.fault_of_call(found[0], TimeoutError(f"not back after {found[1]:.0f} s"))
                if not is_over.is_set():
                    on_fault(fault)
                return

    thread = threading.Thread(target=serve, name="doctor's watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()


@contextmanager
def watching_store(lobby: Lobby, limit: float, on_fault: Callable[[RuntimeFault], None]) -> Iterator[None]:
    """Call `on_fault` once if the store leaves a request unanswered for `limit` seconds: torch's own waits on."""
    is_over = threading.Event()

    def serve() -> None:
        store = lobby.store.clone()  # type: ignore[attr-defined]  # a connection that no other request holds
        while not is_over.wait(PROBE):
            try:
                patiently(lambda: store.check(["told"]), limit)
            except RuntimeError:
                if not is_over.is_set():
                    on_fault(lobby.lost())
                return

    threading.Thread(target=serve, name="doctor's probe", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()


__all__ = ["watch", "watching", "watching_store"]
