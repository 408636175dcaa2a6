"""Ranks as threads of this process: any mesh on one machine, for notebooks, debugging and most tests.

In: a mesh, the `Needs` of a program. Out: a `ThreadWorld` with one `World` per rank, and `Ranks`, the threads that
run a function on all of them. A collective is a *round*: every rank of the group posts its call and tensor, and the
last to arrive computes everybody's result, in rank order, so that all get the same bits. Posts that disagree on
(kind, site, shape, dtype) are a fault that names both ranks: this world is also the checker of the order of
collectives.

    shared = ThreadWorld(Mesh(t=2), Needs(axes=(("tp",),)))
    run_ranks(shared, lambda world: world.group(("tp",)).all_reduce(torch.ones(2), "sum"))

When a rank raises, that exception is the *first fault*: the waiting ranks are released with `Aborted`, which is never
shown.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import torch

from autoptd.errors import AutoptdError, RuntimeFault
from autoptd.ir.mesh import Mesh
from autoptd.runtime.world import Channel, Done, Group, Like, Needs, Pending, World, fault_site

Result = TypeVar("Result")
Call = tuple[str, str, Any, Any]  # kind, site, shapes, dtypes
Combine = Callable[[list[Any]], list[Any]]  # every rank's payload -> every rank's result
GRACE = 10.0  # seconds that the other ranks get to end after a fault


class Aborted(Exception):
    """Another rank failed: this rank only stops."""


class ThreadWorld:
    """What the rank threads share; `worlds[rank]` is the World of one rank."""

    def __init__(self, mesh: Mesh, needs: Needs | None = None, device: str = "cpu", timeout: float = 300.0) -> None:
        self.mesh, self.timeout = mesh, timeout
        self.fault: tuple[int, str, BaseException] | None = None  # rank, action, exception: the first one
        self._lock = threading.Lock()
        self._waiting: set[threading.Event] = set()
        needs = needs or Needs()
        meetings = {ranks: _Meeting(self, ranks) for ranks in needs.groups(mesh)}
        pipes = {link: _Pipe(self, *link) for link in needs.channels(mesh)}
        self._parts: list[_Meeting | _Pipe] = [*meetings.values(), *pipes.values()]
        self.worlds = [ThreadRank(self, rank, torch.device(device)) for rank in range(mesh.size)]
        for ranks, meeting in meetings.items():
            for index, rank in enumerate(ranks):
                self.worlds[rank]._groups[ranks] = ThreadGroup(self.worlds[rank], meeting, index)
        for (source, target), pipe in pipes.items():
            self.worlds[source]._outgoing[target] = ThreadChannel(self.worlds[source], pipe)
            self.worlds[target]._incoming[source] = ThreadChannel(self.worlds[target], pipe)

    def fail(self, rank: int, at: str, exc: BaseException) -> None:
        """Record the first fault and release everybody who waits."""
        if isinstance(exc, Aborted):
            return
        with self._lock:
            self.fault = self.fault or (rank, at, exc)
            for event in self._waiting:
                event.set()

    def reset(self) -> None:
        """Forget a fault and all half-finished calls; no rank may be running."""
        self.fault = None
        self._waiting.clear()
        for part in self._parts:
            part.clear()

    def wait(self, event: threading.Event, world: ThreadRank, what: str, missing: Callable[[], list[int]]) -> None:
        """Block until `event`. Aborted after a fault elsewhere; after the timeout a RuntimeFault names the missing."""
        with self._lock:
            if self.fault:
                raise Aborted
            self._waiting.add(event)
        arrived = event.wait(self.timeout)
        with self._lock:
            self._waiting.discard(event)
            if self.fault:
                raise Aborted
        if not arrived:
            others = "; ".join(self.worlds[rank].describe() for rank in missing())
            raise RuntimeFault(
                fault_site(world.rank, world.at),
                f"waited {self.timeout:g} s for {what}; not arrived: {others}",
                "find out what the ranks that have not arrived are doing, or raise timeout=",
            )


class ThreadRank(World):
    """The World of one thread."""

    def __init__(self, shared: ThreadWorld, rank: int, device: torch.device) -> None:
        super().__init__(rank, shared.mesh, device, shared.timeout)
        self.shared = shared
        self.last_call = ""

    def report_fault(self, exc: BaseException) -> None:
        self.shared.fail(self.rank, self.at, exc)

    def describe(self) -> str:
        """What the rank was last doing, for messages."""
        return f"{fault_site(self.rank, self.at)}" + (f" (last call: {self.last_call})" if self.last_call else "")


class _Round:
    """One collective call under way: posts arrive until all are there, then the results are."""

    def __init__(self, size: int) -> None:
        self.calls: list[Call | None] = [None] * size
        self.payloads: list[Any] = [None] * size
        self.results: list[Any] = []
        self.complete = threading.Event()


class _Meeting:
    """The shared side of one group: its rounds, numbered per rank in calling order."""

    def __init__(self, shared: ThreadWorld, ranks: tuple[int, ...]) -> None:
        self.shared, self.ranks = shared, ranks
        self.lock = threading.Lock()
        self.clear()

    def clear(self) -> None:
        self.rounds: dict[int, _Round] = {}
        self.counts = [0] * len(self.ranks)

    def post(self, world: ThreadRank, index: int, call: Call, payload: Any, combine: Combine) -> _Round:
        """Enter this rank's next round; the last to arrive computes all results. Does not block for others."""
        with self.lock:
            number = self.counts[index]
            self.counts[index] += 1
            turn = self.rounds.setdefault(number, _Round(len(self.ranks)))
            turn.calls[index], turn.payloads[index] = call, payload
            self._check(world, turn, index)
            is_last = None not in turn.calls
            if is_last:
                del self.rounds[number]
        if is_last:
            with torch.no_grad():
                turn.results = combine(turn.payloads)
            turn.payloads = []
            turn.complete.set()
        return turn

    def _check(self, world: ThreadRank, turn: _Round, index: int) -> None:
        for other, call in enumerate(turn.calls):
            if call is not None and call != turn.calls[index]:
                peer = self.shared.worlds[self.ranks[other]]
                raise RuntimeFault(
                    fault_site(world.rank, world.at),
                    f"calls {_call_text(turn.calls[index])} where {fault_site(peer.rank, peer.at)} calls "
                    f"{_call_text(call)} of the same group",
                    "all ranks of a group must make the same calls in the same order",
                )

    def missing(self, turn: _Round) -> list[int]:
        return [self.ranks[index] for index, call in enumerate(turn.calls) if call is None]


class ThreadGroup(Group):
    """One thread's handle on a meeting."""

    def __init__(self, world: ThreadRank, meeting: _Meeting, index: int) -> None:
        super().__init__(meeting.ranks, index)
        self._world, self._meeting = world, meeting

    def all_reduce(self, x: torch.Tensor, site: str, op: str = "sum") -> torch.Tensor:
        return self._meet(
            f"all_reduce {op}", site, [x], lambda posts: _copies(_reduced([p[0] for p in posts], op), self.size)
        )

    def all_gather(self, x: torch.Tensor, site: str) -> list[torch.Tensor]:
        return self._meet("all_gather", site, [x], lambda posts: [[p[0].clone() for p in posts] for _ in posts])

    def reduce_scatter(self, parts: Sequence[torch.Tensor], site: str) -> torch.Tensor:
        return self._meet(
            "reduce_scatter", site, parts, lambda posts: [_reduced(column) for column in zip(*posts, strict=True)]
        )

    def all_to_all(self, parts: Sequence[torch.Tensor], site: str) -> list[torch.Tensor]:
        return self._meet(
            "all_to_all",
            site,
            parts,
            lambda posts: [[x.clone() for x in column] for column in zip(*posts, strict=True)],
        )

    def broadcast(self, x: torch.Tensor, source_index: int, site: str) -> torch.Tensor:
        return self._meet(
            f"broadcast from {source_index}", site, [x], lambda posts: _copies(posts[source_index][0], self.size)
        )

    def all_reduce_start(self, flat: torch.Tensor, site: str) -> Pending:
        def combine(posts: list[Any]) -> list[Any]:
            total = _reduced([post[0] for post in posts])
            return [post[0].copy_(total) for post in posts]

        return self._start("all_reduce_start", site, [flat], combine)

    def gather_objects(self, obj: Any, site: str) -> list[Any]:
        pending = self._post(
            ("gather_objects", site, None, None), obj, lambda objects: [list(objects) for _ in objects]
        )
        return pending.wait()  # type: ignore[no-any-return]

    def _meet(self, kind: str, site: str, tensors: Sequence[torch.Tensor], combine: Combine) -> Any:
        return self._start(kind, site, tensors, combine).wait()

    def _start(self, kind: str, site: str, tensors: Sequence[torch.Tensor], combine: Combine) -> Pending:
        return self._post((kind, site, *_shapes_and_dtypes(tensors)), list(tensors), combine)

    def _post(self, call: Call, payload: Any, combine: Combine) -> Pending:
        self._world.last_call = _call_text(call)
        turn = self._meeting.post(self._world, self.index, call, payload, combine)
        return _Turn(self, turn, self._world.last_call)


class _Turn(Pending):
    """This rank's wait for a round."""

    def __init__(self, group: ThreadGroup, turn: _Round, what: str) -> None:
        self._group, self._turn, self._what = group, turn, what

    def wait(self) -> Any:
        world, meeting, turn = self._group._world, self._group._meeting, self._turn
        if world.shared.fault or not turn.complete.is_set():
            world.shared.wait(turn.complete, world, self._what, lambda: meeting.missing(turn))
        return turn.results[self._group.index]

    def is_done(self) -> bool:
        return self._turn.complete.is_set()


class _Pipe:
    """The shared side of one channel: messages numbered in sending order, and who waits for which."""

    def __init__(self, shared: ThreadWorld, source: int, target: int) -> None:
        self.shared, self.source, self.target = shared, source, target
        self.lock = threading.Lock()
        self.clear()

    def clear(self) -> None:
        self.sent, self.received = 0, 0
        self.messages: dict[int, tuple[list[torch.Tensor], str]] = {}
        self.arrivals: dict[int, threading.Event] = {}

    def put(self, tensors: list[torch.Tensor], site: str) -> None:
        with self.lock:
            self.messages[self.sent] = (tensors, site)
            self.arrivals.setdefault(self.sent, threading.Event()).set()
            self.sent += 1

    def next_arrival(self) -> tuple[int, threading.Event]:
        with self.lock:
            number = self.received
            self.received += 1
            return number, self.arrivals.setdefault(number, threading.Event())

    def take(self, number: int) -> tuple[list[torch.Tensor], str]:
        with self.lock:
            del self.arrivals[number]
            return self.messages.pop(number)


class ThreadChannel(Channel):
    """One thread's end of a pipe."""

    def __init__(self, world: ThreadRank, pipe: _Pipe) -> None:
        self._world, self._pipe = world, pipe

    def send(self, tensors: Sequence[torch.Tensor], site: str) -> Pending:
        self._world.last_call = f"send {site!r}"
        self._pipe.put([x.detach().clone() for x in tensors], site)
        return Done()

    def receive(self, like: Sequence[Like], site: str) -> Pending:
        return _Receipt(self._world, self._pipe, like, site)


class _Receipt(Pending):
    """A posted receive: the n-th posted takes the n-th message."""

    def __init__(self, world: ThreadRank, pipe: _Pipe, like: Sequence[Like], site: str) -> None:
        self._world, self._pipe, self._site = world, pipe, site
        self._like = ([tuple(shape) for shape, _ in like], [dtype for _, dtype in like])
        self._number, self._event = pipe.next_arrival()
        self._tensors: list[torch.Tensor] | None = None

    def wait(self) -> list[torch.Tensor]:
        if self._tensors is None:
            world, source = self._world, self._pipe.source
            world.last_call = f"receive {self._site!r} from rank {source}"
            if world.shared.fault or not self._event.is_set():
                world.shared.wait(self._event, world, world.last_call, lambda: [source])
            tensors, sent_as = self._pipe.take(self._number)
            if _shapes_and_dtypes(tensors) != self._like:
                raise RuntimeFault(
                    fault_site(world.rank, world.at),
                    f"receives {self._site!r} as {self._like}, but rank {source} sent {sent_as!r} as "
                    f"{_shapes_and_dtypes(tensors)}",
                    "both ends of a channel must name the same tensors in the same order",
                )
            self._tensors = tensors
        return self._tensors

    def is_done(self) -> bool:
        return self._tensors is not None or self._event.is_set()


class Ranks:
    """One thread per rank, kept for many `run`s (steps). After a fault the pool can be used again if every rank ended;
    a rank that hangs cannot be stopped, so the pool is then broken and says so."""

    def __init__(self, shared: ThreadWorld) -> None:
        self.shared = shared
        self._stuck: list[int] = []
        self._jobs: list[SimpleQueue[Any]] = [SimpleQueue() for _ in shared.worlds]
        self._ended: SimpleQueue[tuple[int, Any]] = SimpleQueue()
        for world, jobs in zip(shared.worlds, self._jobs, strict=True):
            name, args = f"rank {world.rank}", (world, jobs, self._ended)
            threading.Thread(target=_serve, args=args, name=name, daemon=True).start()
        self._end = weakref.finalize(self, _end, self._jobs)

    def run(self, fn: Callable[[World], Result]) -> list[Result]:
        """Call `fn(world)` on every rank; return the results in rank order, or raise the first fault."""
        if self._stuck:
            raise RuntimeFault(
                "ranks as threads", f"ranks {self._stuck} still hang after an earlier fault", "start the model anew"
            )
        for jobs in self._jobs:
            jobs.put(fn)
        results: dict[int, Any] = {}
        try:
            self._collect(results)
        except BaseException as exc:  # KeyboardInterrupt in the caller: stop the ranks as well
            self.shared.fail(-1, "run", exc)
            self._collect(results)
            raise
        finally:
            self._stuck = sorted(set(range(len(self._jobs))) - set(results))
            fault = self.shared.fault
            if fault and not self._stuck:
                self.shared.reset()
        if fault:
            _raise_fault(*fault)
        return [results[rank] for rank in range(len(self._jobs))]

    def close(self) -> None:
        """End the threads."""
        self._end()

    def _collect(self, results: dict[int, Any]) -> None:
        """Wait for every rank; after a fault, for GRACE seconds at most."""
        deadline = None
        while len(results) < len(self._jobs):
            if self.shared.fault and deadline is None:
                deadline = time.monotonic() + min(GRACE, self.shared.timeout)
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                rank, result = self._ended.get(timeout=left)
            except Empty:
                return
            results[rank] = result


def run_ranks(shared: ThreadWorld, fn: Callable[[World], Result]) -> list[Result]:
    """Call `fn(world)` once on every rank, each in its thread; return the results or raise the first fault."""
    ranks = Ranks(shared)
    try:
        return ranks.run(fn)
    finally:
        ranks.close()


def _end(all_jobs: list[SimpleQueue[Any]]) -> None:
    for jobs in all_jobs:
        jobs.put(None)


def _serve(world: ThreadRank, jobs: SimpleQueue[Any], ended: SimpleQueue[tuple[int, Any]]) -> None:
    """The life of a rank thread: run jobs until told None."""
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
    while (fn := jobs.get()) is not None:
        result = None
        try:
            # On CUDA all ranks would share autograd's one backward thread, and the first to wait would stop the others.
            with torch.autograd.set_multithreading_enabled(False):
                result = fn(world)
        except BaseException as exc:
            world.report_fault(exc)
        del fn
        ended.put((world.rank, result))
        del result


def _raise_fault(rank: int, at: str, exc: BaseException) -> None:
    if isinstance(exc, AutoptdError) or not isinstance(exc, Exception):
        raise exc
    raise RuntimeFault(
        fault_site(rank, at), f"{type(exc).__name__}: {exc}", "see the exception above, raised on that rank"
    ) from exc


def _reduced(tensors: Sequence[torch.Tensor], op: str = "sum") -> torch.Tensor:
    """Sum or maximum, in rank order, as a new contiguous tensor."""
    total = tensors[0].clone(memory_format=torch.contiguous_format)
    for x in tensors[1:]:
        if op == "sum":
            total += x
        else:
            torch.maximum(total, x, out=total)
    return total


def _copies(x: torch.Tensor, count: int) -> list[torch.Tensor]:
    return [x.clone(memory_format=torch.contiguous_format) for _ in range(count)]


def _shapes_and_dtypes(tensors: Sequence[torch.Tensor]) -> tuple[list[tuple[int, ...]], list[torch.dtype]]:
    return [tuple(x.shape) for x in tensors], [x.dtype for x in tensors]


def _call_text(call: Call | None) -> str:
    if call is None:
        return "nothing"
    kind, site, shapes, dtypes = call
    sizes = "" if shapes is None else ", ".join(f"{list(s)} {str(d)[6:]}" for s, d in zip(shapes, dtypes, strict=True))
    return f"{kind} {site!r}" + (f" of {sizes}" if sizes else "")
