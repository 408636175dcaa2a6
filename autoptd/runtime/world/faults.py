"""How ranks in several processes tell each other why they stopped, through a key-value store.

Every rank's *beat* thread writes once a second what the rank is executing and the last call that it made. A
rank whose call fails asks for the first fault: a peer's own exception if there is one, else the peer that
made another call in its place, else the ranks whose beat stopped (gone), else those that wait in no call
(hung). The first answer is kept in the store, so that all ranks say the same.

    board = FaultBoard(store, world)
    board.report(exc)                               # user code on this rank raised
    raise board.fault_of_call(call, exc)            # a call of this rank failed

A request to a store whose host does not answer never ends, whatever timeout it was given. So requests are
made by the beat thread, and whoever asks waits for PATIENCE seconds at most.
"""

from __future__ import annotations

import atexit
import json
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Thread
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from autoptd.errors import InternalError, RuntimeFault
from autoptd.runtime.world.pages import Pages
from autoptd.runtime.world.recorder import Recorder, ranges_text
from autoptd.runtime.world.world import World, fault_site

# Seconds between two beats of a rank.
BEAT = 1.0
# Seconds within which a living rank has beaten twice.
GRACE = 2.6
# Seconds that the store has to answer.
PATIENCE = 5.0
# The key of the fault that every rank shows.
FIRST = "first fault"
Answer = TypeVar("Answer")
# Rank -> its last beat.
Beats = dict[int, dict[str, Any]]


class Call(NamedTuple):
    """What a rank calls that others take part in: call number `number` of the group of `ranks`, or a message
    of a channel.
    """

    kind: str
    site: str
    ranks: tuple[int, ...] = ()
    number: int = 0
    # Bytes that this rank hands in; -1 where they may differ from rank to rank.
    nbytes: int = -1

    def __str__(self) -> str:
        size = f" of {self.nbytes} bytes" if self.nbytes >= 0 else ""
        return f"{self.kind} {self.site!r}{size}"

    def differs(self, other: Call) -> bool:
        """Tell whether the two are one call of their group, made differently."""
        same_place = (self.ranks, self.number) == (other.ranks, other.number) and self.number > 0
        return same_place and (self.kind, self.site, self.nbytes) != (other.kind, other.site, other.nbytes)


class FaultBoard:
    """One rank's access to the store in which faults and beats are written.

    `notes_calls`: on pages as well (`pages.py`).
    """

    def __init__(self, store: dist.Store, world: World, *, notes_calls: bool = False) -> None:
        self._world = world
        run = _name_of_run(store)
        self._pages = Pages(run, world.rank) if notes_calls else None
        self.recorder = Recorder(world.rank, run)
        # The last call that this rank made.
        self._last: Call | None = None
        # Whether the rank is in that call now.
        self._is_waiting = False
        # When it made that call.
        self._entered = 0.0
        # The first fault as last read: the store may die with the rank that hosts it.
        self._first: dict[str, Any] | None = None
        self._reported = False
        # The store is gone, or silent.
        self._is_lost = False
        # The main thread has raised something.
        self.is_out = False
        # The groups of the world were aborted: no call can work.
        self.is_ended = False
        # Where the device is, if it has been there for a while.
        self.behind: tuple[str, Call] | None = None
        self._requests: SimpleQueue[tuple[Callable[[dist.Store], Any], SimpleQueue[Any]] | None] = (
            SimpleQueue()
        )
        # Every rank has a beat before its first call: without one it has not arrived.
        self._set_beat(store, 0)
        own = store.clone()  # type: ignore[attr-defined]  # a connection that no blocking call of this rank holds
        self._thread = Thread(target=self._serve, args=(own,), name="beat", daemon=True)
        self._thread.start()
        # A thread that is inside the store's C++ code when the interpreter ends aborts the process.
        atexit.register(self.close)

    def close(self) -> None:
        atexit.unregister(self.close)
        self._requests.put(None)
        self._thread.join(timeout=2 * BEAT)
        if self._pages is not None:
            self._pages.close()

    def enter(self, call: Call) -> None:
        """Note that this rank makes `call` now; on a world that has ended, raise the first fault."""
        if self.is_ended:
            self.raise_first()
        self._last, self._entered, self._is_waiting = call, time.monotonic(), True
        if self._pages is not None:
            self._pages.write((self._world.at, *call))

    def leave(self) -> None:
        """Note that the call is over."""
        self._is_waiting = False

    def waiting(self) -> tuple[Call, float] | None:
        """Return the call in which this rank is, and for how many seconds.

        None outside of one. Any thread may ask.
        """
        call, entered = self._last, self._entered
        return (call, time.monotonic() - entered) if self._is_waiting and call is not None else None

    @property
    def last_call(self) -> Call | None:
        """The last call that this rank made."""
        return self._last

    @property
    def is_known(self) -> bool:
        """Whether there is a first fault."""
        return self._first is not None

    def first_fault(self) -> RuntimeFault:
        """Return the first fault, which is known, as this rank shows it."""
        if self._first is None:
            raise InternalError(
                fault_site(self._world.rank, self._world.at), "asks for a first fault, and none is known"
            )
        return self._as_fault(self._first, self._last)

    def raise_first(self) -> None:
        """Raise the first fault if one is known; not again in a world that went on after it."""
        if self._first is not None and (self.is_ended or not self.is_out):
            self._reported = self.is_out = True
            raise self.first_fault()

    def report(self, exc: BaseException) -> None:
        """Publish that this rank itself failed; faults that came from elsewhere are known already."""
        self.is_out = True
        if self._reported:
            return
        self._reported = True
        self._publish(
            {"rank": self._world.rank, "at": self._world.at, "error": f"{type(exc).__name__}: {exc}"}
        )

    def fault_of_call(self, call: Call, exc: BaseException) -> RuntimeFault:
        """Return the fault to raise when `call` failed with `exc`.

        Takes GRACE seconds, and PATIENCE more at most.
        """
        self.is_out = True
        return self.diagnose(call, exc)

    def diagnose(self, call: Call, exc: BaseException, at: str | None = None) -> RuntimeFault:
        """Find the fault of a call that failed while this rank, or its device, executed `at`.

        Any thread may ask.
        """
        at = at or self._world.at
        self._reported = True
        before = self._ask(self._beats)
        deadline = time.monotonic() + GRACE
        while time.monotonic() < deadline and not self._ask(self._read_first):
            time.sleep(0.1)
        first = self._first
        if first is None:
            blame = self._blame(call, at, before, self._ask(self._beats))
            first = {
                "rank": self._world.rank,
                "at": at,
                "error": f"{call} failed; {blame}",
                "cause": str(exc),
            }
            self._publish(first)
            first = self._first or first
        else:
            self._linger()
        return self._as_fault(first, call)

    def absent(self) -> list[int]:
        """Return the ranks that have no board yet; none where the store gives no answer."""
        everyone = range(self._world.mesh.size)
        return (
            self._ask(lambda store: [rank for rank in everyone if not store.check([_beat_key(rank)])]) or []
        )

    def _ask(self, request: Callable[[dist.Store], Answer]) -> Answer | None:
        """Let the beat thread make a request.

        None when the store is gone, or was silent for PATIENCE seconds.
        """
        answer: SimpleQueue[Answer | None] = SimpleQueue()
        if not self._is_lost:
            self._requests.put((request, answer))
            with suppress(Empty):
                return answer.get(timeout=PATIENCE)
        # The thread may hang in this request, or in its beat.
        self._is_lost = True
        return None

    def _serve(self, store: dist.Store) -> None:
        """The life of the beat thread: beat, and make requests in between."""
        count, next_beat = 0, time.monotonic() + BEAT
        while True:
            try:
                job = self._requests.get(timeout=max(next_beat - time.monotonic(), 0.0))
            except Empty:
                count, next_beat = count + 1, time.monotonic() + BEAT
                self._try(self._set_beat, store, count)
                self._try(self._read_first, store)
                continue
            if job is None:
                return
            request, answer = job
            answer.put(self._try(request, store))

    def _try(self, request: Callable[..., Answer], *args: Any) -> Answer | None:
        if self._is_lost:
            # The store is lost: each further attempt would make torch print a page of frames.
            return None
        try:
            return request(*args)
        except Exception:
            # The store is gone, and with it everybody who could read.
            self._is_lost = True
            return None

    def _publish(self, fault: dict[str, Any]) -> None:
        """Write the fault unless another came first."""

        def write(store: dist.Store) -> bool:
            store.compare_set(FIRST, "", json.dumps(fault))
            return self._read_first(store)

        if self._ask(write):
            self._linger()
        else:
            # The store is gone: keep the fault for this rank.
            self._first = self._first or fault
            self.recorder.dump()

    def _as_fault(self, first: dict[str, Any], call: Call | None) -> RuntimeFault:
        """Return the first fault as this rank shows it."""
        fact, world = first["error"] + (f" ({first['cause']})" if first.get("cause") else ""), self._world
        if first["rank"] != world.rank:
            fact += f" [seen by {fault_site(world.rank, world.at)}{f' in {call}' if call else ''}]"
        remedy = f"look at that rank's own output, or raise timeout= if it was only slow{self.recorder.hint}"
        return RuntimeFault(fault_site(first["rank"], first["at"]), fact, remedy)

    def _linger(self) -> None:
        """Rank 0, which may host the store, stays until every beat thread has read the first fault."""
        if self._world.rank == 0 and self._world.mesh.size > 1:
            time.sleep(2 * BEAT)

    def _read_first(self, store: dist.Store) -> bool:
        """Return whether a first fault is known."""
        if self._first is None and store.check([FIRST]) and (text := store.get(FIRST)):
            self._first = json.loads(text)
            # Every rank's, in its own thread: also of the one that failed.
            self.recorder.dump()
        return self._first is not None

    def _set_beat(self, store: dist.Store, count: int) -> None:
        at, call = self.behind or (self._world.at, self._last)
        state = {
            "count": count,
            "at": at,
            "call": call,
            "is_waiting": self._is_waiting or self.behind is not None,
        }
        store.set(_beat_key(self._world.rank), json.dumps(state))

    def _beats(self, store: dist.Store) -> Beats:
        """Return the last beat of every other rank."""
        others = [rank for rank in range(self._world.mesh.size) if rank != self._world.rank]
        texts = store.multi_get([_beat_key(rank) for rank in others])
        return {rank: json.loads(text) for rank, text in zip(others, texts, strict=True)}

    def _blame(self, call: Call, at: str, before: Beats | None, after: Beats | None) -> str:
        """Say which rank made another call, or which are gone (no beat in between), or in no call, or else
        who is where.
        """
        others = [rank for rank in range(self._world.mesh.size) if rank != self._world.rank]
        lasts = {rank: self._last_of(rank, after) for rank in others}
        for rank, (their_at, last) in lasts.items():
            if last is not None and call.differs(last):
                mine, theirs = (
                    f"{fault_site(self._world.rank, at)}: {call}",
                    f"{fault_site(rank, their_at)}: {last}",
                )
                return f"call {call.number} of ranks {_listed(call.ranks)} is not the same on {mine}, and {theirs}"
        if before is None or after is None:
            return self._blame_lost_store(others, lasts)
        gone = [rank for rank in others if after[rank]["count"] == before[rank]["count"]]
        if gone:
            return _describe(gone, lasts, "gone")
        hung = [rank for rank in others if not after[rank]["is_waiting"]]
        if hung:
            return _describe(hung, {rank: (after[rank]["at"], None) for rank in hung}, "hung or slow")
        return _describe(others, lasts, "waiting as well")

    def _blame_lost_store(self, others: Sequence[int], lasts: dict[int, tuple[str, Call | None]]) -> str:
        """Say which ranks of this machine are gone; that it may be cut off, and who is on others."""
        lost = "the store does not answer: rank 0, or what else hosts the store, is gone, or this node is cut off"
        if self._pages is None:
            return lost
        elsewhere = [rank for rank in others if self._pages.read(rank) is None]
        if elsewhere:
            lost += f" from rank{'s' * (len(elsewhere) > 1)} {ranges_text(elsewhere)}"
        dead = [rank for rank in others if self._pages.is_dead(rank)]
        return "; ".join([_describe(dead, lasts, "gone"), lost]) if dead else lost

    def _last_of(self, rank: int, beats: Beats | None) -> tuple[str, Call | None]:
        """What a rank was executing, and its last call: by its page, where it is on this machine, else by its
        beat.
        """
        if self._pages is not None and (noted := self._pages.read(rank)) is not None:
            at, kind, site, ranks, number, nbytes = noted
            return at, Call(kind, site, _numbers(ranks), int(number), int(nbytes))
        if beats is None or beats[rank]["call"] is None:
            return "start" if beats is None else beats[rank]["at"], None
        kind, site, ranks, number, nbytes = beats[rank]["call"]
        return beats[rank]["at"], Call(kind, site, tuple(ranks), number, nbytes)


def _name_of_run(store: dist.Store) -> str:
    """A name that no other run has: the first rank's."""
    return bytes(store.compare_set("name", "", uuid.uuid4().hex)).decode()


def _beat_key(rank: int) -> str:
    return f"beat of {rank}"


def _numbers(text: str) -> tuple[int, ...]:
    """(0, 2) of the text "(0, 2)"."""
    return tuple(int(part) for part in text.strip("()").split(",") if part.strip())


def _describe(ranks: Sequence[int], lasts: dict[int, tuple[str, Call | None]], what: str) -> str:
    texts = []
    for rank in ranks:
        at, call = lasts[rank]
        texts.append(f"rank {rank} is {what}: it was last known at {at}" + (f" in {call}" if call else ""))
    return "; ".join(texts)


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


class WaitingCall:
    """The time of a call that others take part in; when it fails, the first fault is raised instead."""

    def __init__(self, board: FaultBoard, call: Call) -> None:
        self._board, self._call = board, call

    def __enter__(self) -> Call:
        self._board.enter(self._call)
        return self._call

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, _: TracebackType | None
    ) -> None:
        if exc is None:
            self._board.leave()
        # What torch.distributed raises for timeouts and lost connections.
        elif isinstance(exc, RuntimeError):
            raise self._board.fault_of_call(self._call, exc) from exc
        else:
            self._board.leave()
