"""Share the first fault between ranks in several processes through a key-value store, and name the rank to blame.

Every rank's *beat* thread writes once a second the action that the rank is executing and its last call. A rank whose
call fails determines the first fault: a peer's own exception if there is one, else the peer that made another call in
its place, else the ranks that reported their exit, else those whose beat stopped (gone), else those that wait in no
call (hung). The first answer is kept in the store, so that all ranks report the same.

The beat thread also ends waits. Once there is a first fault, or the ranks' scripts are seen to make different calls,
the call in which the main thread waits is aborted: its peer may never arrive, and neither Ctrl-C nor anything else in
Python reaches a thread inside such a call.

    board = FaultBoard(store, world)
    meet(board, world, words)                       # wait until every rank has a board
    board.begin("pm.save")                          # the script makes a call that all ranks make
    with WaitingCall(board, call):                  # a call that other ranks take part in: raises the first fault
        work.wait()
    board.report(exc)                               # user code on this rank raised

A request to a store whose host does not answer never returns, whatever its timeout. So the beat thread makes all
requests, and other threads wait for its answer for PATIENCE seconds at most.
"""

from __future__ import annotations

import atexit
import json
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from autoptd.errors import InternalError, RuntimeFault
from autoptd.runtime.world.pages import Pages
from autoptd.runtime.world.recorder import Recorder, ranges_text
from autoptd.runtime.world.rendezvous import cause_of_end, first_that_left, in_short, stay_for
from autoptd.runtime.world.world import World, fault_site

# (number, what): the last calls of a rank's script, ascending.
ScriptCalls = tuple[tuple[int, str], ...]
# Number of calls kept: more than one rank can be ahead of another.
KEPT = 8
# Rank -> its last beat.
Beats = dict[int, dict[str, Any]]
# Seconds between two beats of a rank.
BEAT = 1.0
# Seconds within which a live rank beats twice.
GRACE = 2.6
# Seconds to wait for an answer of the store.
PATIENCE = 5.0
# Beats in the same call before the calls of the other ranks' scripts are compared, and between comparisons.
ASKS_AFTER, ASKS_EVERY = 2, 10
ON_ALL_RANKS = (
    "every rank makes every call of pm and of its optimizer: make it on all ranks, and write or print on one"
)
# The keys of the fault that every rank raises, and of the number of ranks that arrived.
FIRST, ARRIVED = "first fault", "arrived"
Answer = TypeVar("Answer")
# Seconds between two polls of the arrived ranks: at first, and at most.
SOON, LATER = 0.001, 0.1
PLACE = "not arrived at parallelize or pm.step"


class Call(NamedTuple):
    """A call that a rank makes together with others: number `number` of the group `ranks`, or a message."""

    kind: str
    site: str
    ranks: tuple[int, ...] = ()
    number: int = 0
    # Bytes that this rank hands in; -1 where they may differ from rank to rank.
    nbytes: int = -1

    @property
    def place(self) -> tuple[object, ...]:
        """Return the position of the call in its group."""
        return self.ranks, self.number

    @property
    def form(self) -> tuple[object, ...]:
        """Return the properties that must agree on all ranks that make the call."""
        return self.kind, self.site, self.nbytes

    def __str__(self) -> str:
        size = f" of {self.nbytes} bytes" if self.nbytes >= 0 else ""
        return f"{self.kind} {self.site!r}{size}"

    def differs(self, other: Call) -> bool:
        """Tell whether both are the same call of their group, but with different properties."""
        return self.number > 0 and self.place == other.place and self.form != other.form


class FaultBoard:
    """One rank's access to the store of faults and beats.

    `notes_calls`: note calls on pages as well (`pages.py`). `end_waits` aborts, from another thread, the call
    in which the main thread waits, if the backend can.
    """

    def __init__(
        self,
        store: dist.Store,
        world: World,
        *,
        notes_calls: bool = False,
        end_waits: Callable[[], None] | None = None,
    ) -> None:
        self._world, self._end_waits = world, end_waits
        # Unique: chosen by the first rank that gets here.
        run = bytes(store.compare_set("name", "", uuid.uuid4().hex)).decode()
        self._pages = Pages(run, world.rank) if notes_calls else None
        self._blame = Blame(world, self._pages)
        self.recorder = Recorder(world.rank, run)
        # The last calls of this rank's script.
        self._script: ScriptCalls = ()
        # Why this rank makes no more calls, if it exits without a fault; whether Ctrl-C has ended one.
        self._left, self._has_left = "", False
        # The last call that this rank made.
        self._last: Call | None = None
        # Whether the rank is in that call now.
        self._is_waiting = False
        # When it made that call.
        self._entered = 0.0
        # The first fault as last read: the store may die with the rank that hosts it.
        self._first: dict[str, Any] | None = None
        self._reported = False
        # The store is gone, or does not answer.
        self._is_lost = False
        # The main thread has raised an exception.
        self.is_out = False
        # The groups of the world were aborted: no call can work.
        self.is_ended = False
        # The action that the device is executing, if it has been there for a while.
        self.behind: tuple[str, Call] | None = None
        # The start of the call that was pending at the last beat, and for how many beats it has been pending.
        self._seen_entered, self._beats_waited = 0.0, 0
        self._requests: SimpleQueue[tuple[Callable[[dist.Store], Any], SimpleQueue[Any]] | None] = (
            SimpleQueue()
        )
        # Every rank has a beat before its first call: without one it has not arrived.
        self._set_beat(store, 0)
        store.add(ARRIVED, 1)
        self._store = store
        own = store.clone()  # type: ignore[attr-defined]  # a connection that no blocking call of this rank holds
        self._thread = Thread(target=self._serve, args=(own,), name="beat", daemon=True)
        self._thread.start()
        # A thread inside the store's C++ code at interpreter exit would abort the process.
        atexit.register(self._end)

    def close(self) -> None:
        """End the thread, and publish that this rank makes no more calls, for ranks that still do."""
        atexit.unregister(self._end)
        self._left = self._left or "its script called pm.close()"
        self._ask(partial(self._set_beat, count=-1))
        self._requests.put(None)
        self._thread.join(timeout=2 * BEAT)
        if self._pages is not None:
            self._pages.close()

    def _end(self) -> None:
        """Report to the others why this process exits without having closed the world."""
        if cause := cause_of_end():
            self.is_out = True
            if self._first is None and not self._reported:
                self._reported = True
                self._publish(self._departure(cause))
        self._left = "its script has ended"
        self.close()

    def begin(self, what: str) -> None:
        """Note that this rank's script calls `what` now, as all ranks' scripts should."""
        number = self._script[-1][0] + 1 if self._script else 1
        self._script = (*self._script[1 - KEPT :], (number, what))

    def enter(self, call: Call) -> None:
        """Note that this rank makes `call` now.

        Raise the first fault if the world has ended. Raise RuntimeFault if another rank of this machine makes
        a different call in its place: gloo would end the process that receives more bytes than it expects.
        """
        if self.is_ended or self._has_left:
            self.raise_first()
        self._last, self._entered, self._is_waiting = call, time.monotonic(), True
        if self._pages is not None:
            self._pages.write((self._world.at, *call.place, *call.form))
            if call.number:
                self._check_others(call, self._pages)

    def _check_others(self, call: Call, pages: Pages) -> None:
        """Raise RuntimeFault if another rank of the group is in the same call with different properties."""
        others = [rank for rank in call.ranks if rank != self._world.rank]
        rank = pages.first_other(others, call.place, call.form)
        if rank is not None:
            self._is_waiting, self.is_out, self._reported = False, True, True
            error = self._blame.other_call(call, rank)
            self._publish({**self._here(), "error": error, "remedy": ON_ALL_RANKS})
            raise self.first_fault()

    def leave(self) -> None:
        """Note that the call is over."""
        self._is_waiting = False

    def waiting(self) -> tuple[Call, float] | None:
        """Return the pending call of this rank and its age in seconds, or None; callable from any thread."""
        call, entered = self._last, self._entered
        return (call, time.monotonic() - entered) if self._is_waiting and call is not None else None

    @property
    def last_call(self) -> Call | None:
        """Return the last call that this rank made."""
        return self._last

    @property
    def is_known(self) -> bool:
        """Tell whether there is a first fault."""
        return self._first is not None

    def first_fault(self) -> RuntimeFault:
        """Return the known first fault, in the words of this rank."""
        if self._first is None:
            raise InternalError(
                fault_site(self._world.rank, self._world.at), "asked for the first fault, but none is known"
            )
        return self._as_fault(self._first, self._last)

    def raise_first(self) -> None:
        """Raise the first fault if one is known; not again in a world that continued after it."""
        if self._first is not None and (self.is_ended or self._has_left or not self.is_out):
            self._reported = self.is_out = True
            raise self.first_fault()

    def report(self, exc: BaseException) -> None:
        """Publish that this rank itself failed; faults of other ranks are already published."""
        self.is_out = True
        if self._reported:
            return
        self._reported = True
        # After Ctrl-C and similar exceptions the calls of this rank no longer match those of others.
        self._has_left = not isinstance(exc, Exception)
        error = in_short(exc, whole=True)
        self._publish(self._departure(error) if self._has_left else {**self._here(), "error": error})

    def fault_of_call(self, call: Call, exc: BaseException) -> RuntimeFault:
        """Return the fault to raise when `call` failed with `exc`.

        Takes GRACE seconds, and PATIENCE more at most.
        """
        self.is_out = True
        return self.diagnose(call, exc)

    def diagnose(self, call: Call, exc: BaseException, at: str | None = None) -> RuntimeFault:
        """Find the fault of a call that failed while this rank, or its device, executed `at`; thread-safe."""
        at = at or self._world.at
        self._reported = True
        before = self._ask(self._beats)
        deadline = time.monotonic() + GRACE
        while time.monotonic() < deadline and not self._ask(self._read_first):
            time.sleep(0.1)
        first = self._first
        if first is None:
            after = self._ask(self._beats)
            error = f"{call} failed; {self._blame.of_call(call, at, before, after)}"
            first = {"rank": self._world.rank, "at": at, "error": error, "cause": str(exc)}
            if after is not None and any(beat["left"] for beat in after.values()):
                first["remedy"] = ON_ALL_RANKS
            self._publish(first)
            first = self._first or first
        else:
            self._linger()
        return self._as_fault(first, call)

    def absent(self) -> list[int]:
        """Return the ranks that have no board yet; none if the store does not answer."""
        everyone = range(self._world.mesh.size)
        return (
            self._ask(lambda store: [rank for rank in everyone if not store.check([_beat_key(rank)])]) or []
        )

    def arrived(self) -> int | None:
        """Return the number of ranks with a board, None if the store is silent; raise the first fault."""
        count = self._ask(lambda store: store.add(ARRIVED, 0))
        self._ask(self._read_first)
        self.raise_first()
        return count

    def _ask(self, request: Callable[[dist.Store], Answer]) -> Answer | None:
        """Let the beat thread make a request; return None if there is no answer within PATIENCE seconds."""
        answer: SimpleQueue[Answer | None] = SimpleQueue()
        if not self._is_lost:
            self._requests.put((request, answer))
            with suppress(Empty):
                return answer.get(timeout=PATIENCE)
        # The thread may hang in this request, or in its beat.
        self._is_lost = True
        return None

    def _serve(self, store: dist.Store) -> None:
        """Run the beat thread: beat, and make requests in between."""
        count, next_beat = 0, time.monotonic() + BEAT
        while True:
            try:
                job = self._requests.get(timeout=max(next_beat - time.monotonic(), 0.0))
            except Empty:
                count, next_beat = count + 1, time.monotonic() + BEAT
                self._try(self._set_beat, store, count)
                self._try(self._read_first, store)
                self._try(self._look_at_wait, store)
                continue
            if job is None:
                return
            request, answer = job
            answer.put(self._try(request, store))

    def _look_at_wait(self, store: dist.Store) -> None:
        """Abort the call of the main thread if it can never complete."""
        entered = self._entered
        if self.is_out or (not self._is_waiting and self.behind is None):
            self._beats_waited = 0
            return
        self._beats_waited = self._beats_waited + 1 if entered == self._seen_entered else 0
        self._seen_entered = entered
        is_asked = self._beats_waited % ASKS_EVERY == ASKS_AFTER and bool(self._script)
        if (
            self._first is None
            and is_asked
            and (error := self._blame.of_scripts(self._script, self._beats(store)))
        ):
            self._write_first(store, {**self._here(), "error": error, "remedy": ON_ALL_RANKS})
        # The waiting thread raises the fault.
        if self._first is not None and self._end_waits is not None:
            self._end_waits()

    def _departure(self, cause: str) -> dict[str, Any]:
        return {**self._here(), "error": f"left ({cause})", "remedy": "look at that rank's own output"}

    def _here(self) -> dict[str, Any]:
        return {"rank": self._world.rank, "at": self._world.at}

    def _try(self, request: Callable[..., Answer], *args: Any) -> Answer | None:
        if self._is_lost:
            # The store is lost: torch would print a stack trace for each further attempt.
            return None
        try:
            return request(*args)
        except Exception:
            # The store is gone: no rank could read the fault.
            self._is_lost = True
            return None

    def _publish(self, fault: dict[str, Any]) -> None:
        """Write the fault unless there already is one."""

        if self._ask(partial(self._write_first, fault=fault)):
            self._linger()
        else:
            # The store is gone: keep the fault for this rank.
            self._first = self._first or fault
            self.recorder.dump()

    def _write_first(self, store: dist.Store, fault: dict[str, Any]) -> bool:
        store.compare_set(FIRST, "", json.dumps(fault))
        return self._read_first(store)

    def _as_fault(self, first: dict[str, Any], call: Call | None) -> RuntimeFault:
        """Convert the first fault to the RuntimeFault that this rank raises."""
        fact, world = first["error"] + (f" ({first['cause']})" if first.get("cause") else ""), self._world
        if first["rank"] != world.rank:
            fact += f" [seen by {fault_site(world.rank, world.at)}{f' in {call}' if call else ''}]"
        remedy = first.get("remedy", "look at that rank's own output, or raise timeout= if it was only slow")
        remedy += self.recorder.hint
        return RuntimeFault(fault_site(first["rank"], first["at"]), fact, remedy)

    def _linger(self) -> None:
        """Keep rank 0, which may host the store, alive until every beat thread has read the first fault.

        Print its fault before: a launcher may end this process as soon as another one has exited.
        """
        if self._world.rank == 0 and self._world.mesh.size > 1:
            stay_for(2 * BEAT, self._store)

    def _read_first(self, store: dist.Store) -> bool:
        """Return whether a first fault is known."""
        if self._first is None and store.check([FIRST]) and (text := store.get(FIRST)):
            self._first = json.loads(text)
            # Run by every rank, in its own thread, including the one that failed.
            self.recorder.dump()
        return self._first is not None

    def _set_beat(self, store: dist.Store, count: int) -> None:
        at, call = self.behind or (self._world.at, self._last)
        state = {
            "count": count,
            "at": at,
            "call": call,
            "is_waiting": self._is_waiting or self.behind is not None,
            "script": self._script,
            "left": self._left,
        }
        store.set(_beat_key(self._world.rank), json.dumps(state))

    def _beats(self, store: dist.Store) -> Beats:
        """Return the last beat of every other rank."""
        others = [rank for rank in range(self._world.mesh.size) if rank != self._world.rank]
        texts = store.multi_get([_beat_key(rank) for rank in others])
        return {rank: json.loads(text) for rank, text in zip(others, texts, strict=True)}


class WaitingCall:
    """Enclose a call that others take part in: the board knows of it, and raises the first fault if it fails."""

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


def meet(board: FaultBoard, world: World, words: dist.Store) -> None:
    """Wait until every rank has a board; raise RuntimeFault if one does not arrive.

    `words` holds the messages of ranks that exited earlier.
    """
    site, deadline, pause = fault_site(world.rank, "start"), time.monotonic() + world.timeout, SOON
    # If the store does not answer, leave it to torch to report why.
    while (count := board.arrived()) is not None and count < world.mesh.size:
        if left := first_that_left(words):
            _stay_as_host(world, words)
            raise RuntimeFault(
                site, f"rank {left[0]} left ({left[1]}), {PLACE}", "look at that rank's own output"
            )
        if time.monotonic() > deadline:
            _stay_as_host(world, words)
            fact = f"waited {world.timeout:g} s for rank {', '.join(map(str, board.absent()))}, {PLACE}"
            raise RuntimeFault(site, fact, "look at their own output; all ranks make the same calls")
        time.sleep(pause)
        pause = min(2 * pause, LATER)


def _stay_as_host(world: World, words: dist.Store) -> None:
    """Let ranks that arrived later than rank 0, which may host the store, find out the same."""
    if world.rank == 0:
        stay_for(2 * BEAT, words)


class Blame:
    """Find the rank to blame for a failed call of the rank of `world`, from the last known state of the others.

    That is their last two beats, or, on this machine, their `pages`, if any.

        blame.of_call(call, "F0.1", before, after)      # "rank 3 is gone: it was last known at B1.0"
        blame.of_scripts(script, beats)                 # "its script calls pm.save where that of rank 1 calls step"
    """

    def __init__(self, world: World, pages: Pages | None) -> None:
        self._world, self._pages = world, pages

    def of_call(self, call: Call, at: str, before: Beats | None, after: Beats | None) -> str:
        """Name the rank that made another call, else the ranks that are gone (no beat in between) or in no
        call, else the position of each rank.
        """
        others = [rank for rank in range(self._world.mesh.size) if rank != self._world.rank]
        lasts = {rank: self.last_of(rank, after) for rank in others}
        for rank, (_, last) in lasts.items():
            if last is not None and call.differs(last):
                return self.other_call(call, rank, after, at)
        if after is not None and (left := [rank for rank in others if after[rank]["left"]]):
            return "; ".join(f"rank {rank} left: {after[rank]['left']}" for rank in left)
        if before is None or after is None:
            return self._of_lost_store(others, lasts)
        gone = [rank for rank in others if after[rank]["count"] == before[rank]["count"]]
        if gone:
            return _last_known(gone, lasts, "gone")
        hung = [rank for rank in others if not after[rank]["is_waiting"]]
        if hung:
            return _last_known(hung, {rank: (after[rank]["at"], None) for rank in hung}, "hung or slow")
        return _last_known(others, lasts, "waiting as well")

    def last_of(self, rank: int, beats: Beats | None) -> tuple[str, Call | None]:
        """Return a rank's last action and its last call: from its page on this machine, else from its beat."""
        if self._pages is not None and (noted := self._pages.read(rank)) is not None:
            at, ranks, number, kind, site, nbytes = noted
            return at, Call(kind, site, _parse_ranks(ranks), int(number), int(nbytes))
        if beats is None or beats[rank]["call"] is None:
            return "start" if beats is None else beats[rank]["at"], None
        kind, site, ranks, number, nbytes = beats[rank]["call"]
        return beats[rank]["at"], Call(kind, site, tuple(ranks), number, nbytes)

    def other_call(self, call: Call, rank: int, beats: Beats | None = None, at: str | None = None) -> str:
        """Describe the different calls that two ranks of a group make in the same place."""
        their_at, last = self.last_of(rank, beats)
        mine = f"{fault_site(self._world.rank, at or self._world.at)}: {call}"
        theirs = f"{fault_site(rank, their_at)}: {last}"
        ranks = ", ".join(map(str, call.ranks))
        return f"call {call.number} of ranks {ranks} differs: {mine}, and {theirs}"

    def _of_lost_store(self, others: Sequence[int], lasts: dict[int, tuple[str, Call | None]]) -> str:
        """Name the dead ranks of this machine, and the ranks on machines that may be cut off."""
        lost = "the store does not answer: rank 0, or what else hosts the store, is gone, or this node is cut off"
        if self._pages is None:
            return lost
        elsewhere = [rank for rank in others if self._pages.read(rank) is None]
        if elsewhere:
            lost += f" from rank{'s' * (len(elsewhere) > 1)} {ranges_text(elsewhere)}"
        dead = [rank for rank in others if self._pages.is_dead(rank)]
        return "; ".join([_last_known(dead, lasts, "gone"), lost]) if dead else lost

    def of_scripts(self, script: ScriptCalls, beats: Beats) -> str:
        """Name the rank whose script makes a different call than this one's; "" if none does."""
        for rank, beat in beats.items():
            if found := _first_difference(script, beat["script"]):
                number, mine, theirs = found
                return f"its script calls {mine} where that of rank {rank} calls {theirs} (call {number} of each)"
        return ""


def _first_difference(mine: ScriptCalls, theirs: ScriptCalls) -> tuple[int, str, str] | None:
    """Return (number, mine, theirs) for the first call that two ranks' scripts make differently, or None."""
    known = dict(theirs)
    for number, what in mine:
        if known.get(number, what) != what:
            return number, what, known[number]
    return None


def _parse_ranks(text: str) -> tuple[int, ...]:
    """Return (0, 2) for "(0, 2)"."""
    return tuple(int(part) for part in text.strip("()").split(",") if part.strip())


def _last_known(ranks: Sequence[int], lasts: dict[int, tuple[str, Call | None]], what: str) -> str:
    """Return `rank 3 is gone: it was last known at B1.0`, for some ranks."""
    texts = []
    for rank in ranks:
        at, call = lasts[rank]
        texts.append(f"rank {rank} is {what}: it was last known at {at}" + (f" in {call}" if call else ""))
    return "; ".join(texts)


def _beat_key(rank: int) -> str:
    return f"beat of {rank}"
