"""How ranks in several processes tell each other why they stopped, through a key-value store.

Every rank's *beat* thread writes once a second what the rank is executing and which call it waits in. A rank whose call
fails asks for the first fault: a peer's own exception if there is one, else the ranks whose beat stopped (gone), else
those that wait in no call (hung). The first answer is kept in the store, so that all ranks say the same.

    board = FaultBoard(store, world)
    board.report(exc)                               # user code on this rank raised
    raise board.fault_of_call("all_reduce 'h.0'", exc)    # a call of this rank failed
"""

from __future__ import annotations

import atexit
import json
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from autoptd.errors import RuntimeFault
from autoptd.runtime.world import World, fault_site

BEAT = 1.0  # seconds between beats
GRACE = 2.6  # seconds in which a living rank has beaten twice
FIRST = "first fault"  # key: the fault that everybody shows


class FaultBoard:
    """One rank's access to the store in which faults and beats are written."""

    def __init__(self, store: dist.Store, world: World) -> None:
        self._store, self._world = store, world
        self.waiting = ""  # the call that this rank is in
        self._first: dict[str, Any] | None = None  # as last read: the store may die with the rank that hosts it
        self._reported = False
        self._stop = threading.Event()
        self._set_beat(store, 0)  # before any call, so that every rank has one
        own = store.clone()  # type: ignore[attr-defined]  # a connection that no blocking call of this rank holds
        self._thread = threading.Thread(target=self._beat, args=(own,), name="beat", daemon=True)
        self._thread.start()
        # A thread that is inside the store's C++ code when the interpreter ends aborts the process.
        atexit.register(self.close)

    def close(self) -> None:
        atexit.unregister(self.close)
        self._stop.set()
        self._thread.join(timeout=2 * BEAT)

    def report(self, exc: BaseException) -> None:
        """Publish that this rank itself failed; faults that came from elsewhere are known already."""
        if self._reported:
            return
        self._reported = True
        self._publish({"rank": self._world.rank, "at": self._world.at, "error": f"{type(exc).__name__}: {exc}"})

    def fault_of_call(self, call: str, exc: BaseException) -> RuntimeFault:
        """Return the fault to raise when `call` failed with `exc`; takes GRACE seconds."""
        self._reported = True
        before = self._beats()
        deadline = time.monotonic() + GRACE
        while time.monotonic() < deadline and not self._read_first(self._store):
            time.sleep(0.1)
        first = self._first
        if first is None:
            blame = self._blame(before, self._beats())
            first = {
                "rank": self._world.rank,
                "at": self._world.at,
                "error": f"{call} failed; {blame}",
                "cause": str(exc),
            }
            self._publish(first)
            first = self._first or first
        else:
            self._linger()
        return _as_fault(first, self._world, call)

    def _publish(self, fault: dict[str, Any]) -> None:
        """Write the fault unless another came first."""
        try:
            self._store.compare_set(FIRST, "", json.dumps(fault))
            self._read_first(self._store)
            self._linger()
        except Exception:
            self._first = self._first or fault  # the store is gone: nobody to tell

    def _linger(self) -> None:
        """Rank 0, which may host the store, stays until every beat thread has read the first fault."""
        if self._world.rank == 0 and self._world.mesh.size > 1:
            time.sleep(2 * BEAT)

    def _read_first(self, store: dist.Store) -> bool:
        """Return whether a first fault is known."""
        try:
            if self._first is None and store.check([FIRST]) and (text := store.get(FIRST)):
                self._first = json.loads(text)
        except Exception:
            return self._first is not None
        return self._first is not None

    def _beat(self, store: dist.Store) -> None:
        count = 0
        while not self._stop.wait(BEAT):
            count += 1
            try:
                self._set_beat(store, count)
            except Exception:
                return  # the store is gone, and with it everybody who could read
            self._read_first(store)

    def _set_beat(self, store: dist.Store, count: int) -> None:
        state = {"count": count, "at": self._world.at, "waiting": self.waiting}
        store.set(_beat_key(self._world.rank), json.dumps(state))

    def _beats(self) -> dict[int, dict[str, Any]] | None:
        """Return the last beat of every other rank; None when the store does not answer."""
        others = [rank for rank in range(self._world.mesh.size) if rank != self._world.rank]
        try:
            texts = self._store.multi_get([_beat_key(rank) for rank in others])
            return {rank: json.loads(text) for rank, text in zip(others, texts, strict=True)}
        except Exception:
            return None

    def _blame(self, before: dict[int, dict[str, Any]] | None, after: dict[int, dict[str, Any]] | None) -> str:
        """Say which ranks are gone (no beat in between), or else which are not in any call, or else who is where."""
        if before is None or after is None:
            return "the store does not answer: rank 0, or the node that hosts the store, is gone"
        gone = [rank for rank in after if after[rank]["count"] == before[rank]["count"]]
        if gone:
            return _describe(gone, after, "gone")
        hung = [rank for rank in after if not after[rank]["waiting"]]
        return _describe(hung, after, "hung or slow") if hung else _describe(list(after), after, "waiting as well")


def _beat_key(rank: int) -> str:
    return f"beat of {rank}"


def _describe(ranks: Sequence[int], beats: dict[int, dict[str, Any]], what: str) -> str:
    texts = []
    for rank in ranks:
        call = f" in {beats[rank]['waiting']}" if beats[rank]["waiting"] else ""
        texts.append(f"rank {rank} is {what}: it was last known at {beats[rank]['at']}{call}")
    return "; ".join(texts)


def _as_fault(first: dict[str, Any], world: World, call: str) -> RuntimeFault:
    fact = first["error"] + (f" ({first['cause']})" if first.get("cause") else "")
    if first["rank"] != world.rank:
        fact += f" [seen by {fault_site(world.rank, world.at)} in {call}]"
    return RuntimeFault(
        fault_site(first["rank"], first["at"]),
        fact,
        "look at that rank's own output, or raise timeout= if it was only slow",
    )
