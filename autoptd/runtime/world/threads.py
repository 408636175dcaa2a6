"""Run ranks as threads of this process: any mesh on one machine, for notebooks, debugging and most tests.

In: a mesh, the `Communicators` of a program. Out: a `ThreadWorld` with one `World` per rank, and `Ranks`, the threads
that run a function on all of them.

    shared = ThreadWorld(Mesh(t=2), Communicators())
    run_ranks(shared, lambda world: world.group(("tp",)).all_reduce(torch.ones(2), "sum"))

When a rank raises, that exception is the *first fault*: the waiting ranks are released with `Aborted`, which is never
shown.

A collective is a *round* of a `Meeting`: every rank of the group posts its call and tensors, and the last to arrive
computes the results of all ranks, in rank order, so that all get the same bits. A channel is a `Pipe`: the n-th receive
takes the n-th message.

Two checks catch errors that threads would tolerate and other transports do not. Posts of a round that disagree on
(kind, site, shape, dtype) are a fault that names both ranks; an asynchronous call has another kind than the blocking
one. And the calls of all groups must have one order (`check_one_order`): NCCL runs the calls of a rank one after the
other, whatever the group.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any, NoReturn, TypeVar

import torch

from autoptd.errors import AutoptdError, InternalError, RuntimeFault
from autoptd.ir.deadlock import find_deadlock
from autoptd.ir.mesh import Mesh
from autoptd.runtime.world.devices import thread_device
from autoptd.runtime.world.world import (
    Channel,
    Communicators,
    Done,
    Group,
    Like,
    Pending,
    World,
    equal_parts,
    fault_site,
    on_device,
    sum_in_order,
)

Result = TypeVar("Result")
# Seconds that the other ranks get to end after a fault.
GRACE = 10.0
# Seconds between two looks at signals: one that another thread receives does not wake up the main thread.
LISTENS = 0.5
REMEDY = "call parallelize again, and pm.load a checkpoint"
# (kind, site, shapes, dtypes)
Call = tuple[str, str, Any, Any]
# Every rank's payload -> every rank's result.
Combine = Callable[[list[Any]], list[Any]]


class Aborted(Exception):
    """Raised to stop a rank after another one failed."""


class ThreadWorld:
    """The state that all rank threads share: their worlds, the first fault, and the waiting ranks.

    `worlds[rank]` is the World of one rank.
    """

    def __init__(
        self,
        mesh: Mesh,
        communicators: Communicators | None = None,
        device: str = "cpu",
        timeout: float = 300.0,
    ) -> None:
        self.mesh, self.timeout = mesh, timeout
        # The first fault: (rank, action, exception).
        self.fault: tuple[int, str, BaseException] | None = None
        # The calls of every rank since the last check, in order.
        self.issued: list[list[_Posts]] = [[] for _ in range(mesh.size)]
        self._lock = threading.Lock()
        # An event for each waiting rank.
        self._waiting: list[threading.Event] = []
        place = thread_device(device)
        self.worlds = [ThreadRank(self, rank, place) for rank in range(mesh.size)]
        communicators = communicators or Communicators()
        self._parts: list[Meeting | Pipe] = []
        for ranks in communicators.groups(mesh):
            meeting = Meeting(self, ranks)
            self._parts.append(meeting)
            for index, rank in enumerate(ranks):
                self.worlds[rank].groups_here[ranks] = ThreadGroup(self.worlds[rank], meeting, index)
        for source, target in communicators.channels(mesh):
            pipe = Pipe(source)
            self._parts.append(pipe)
            self.worlds[source].channels_out[target] = ThreadChannel(self.worlds[source], pipe)
            self.worlds[target].channels_in[source] = ThreadChannel(self.worlds[target], pipe)

    def reset(self) -> None:
        """Forget a fault and all half-finished calls; no rank may be running."""
        self.fault = None
        self.forget_order()
        self._waiting.clear()
        for part in self._parts:
            part.clear()

    def fail(self, rank: int, at: str, exc: BaseException) -> None:
        """Record the first fault and release all waiting ranks."""
        if isinstance(exc, Aborted):
            return
        with self._lock:
            # Later ones are usually consequences of the first.
            self.fault = self.fault or (rank, at, exc)
            for event in self._waiting:
                event.set()

    def check_one_order(self) -> None:
        """Raise InternalError if the collectives since the last check would deadlock when run in order."""
        waiting = find_deadlock(self.issued)
        self.forget_order()
        if waiting:
            texts = "; ".join(posts.text(rank) for rank, posts in waiting)
            raise InternalError("order of collectives", f"ranks wait for each other: {texts}")

    def forget_order(self) -> None:
        for calls in self.issued:
            calls.clear()

    def wait(
        self, event: threading.Event, world: ThreadRank, what: str, missing: Callable[[], list[int]]
    ) -> None:
        """Block until `event`.

        Raise Aborted after a fault elsewhere, and after the timeout a RuntimeFault that names the missing
        ranks.
        """
        with self._lock:
            if self.fault:
                raise Aborted
            self._waiting.append(event)
        arrived = event.wait(self.timeout)
        with self._lock:
            self._waiting.remove(event)
            if self.fault:
                raise Aborted
        if not arrived:
            others = "; ".join(self.worlds[rank].describe() for rank in missing())
            raise RuntimeFault(
                fault_site(world.rank, world.at),
                f"waited {self.timeout:g} s for {what}; not arrived: {others}",
                "find out what the ranks that have not arrived are doing, or raise RankOptions(timeout=)",
            )


class ThreadRank(World):
    """The World of one thread."""

    def __init__(self, shared: ThreadWorld, rank: int, device: torch.device) -> None:
        super().__init__(rank, shared.mesh, device, shared.timeout)
        self.shared = shared
        self.last_call = ""

    def report_fault(self, exc: BaseException) -> None:
        self.shared.fail(self.rank, self.at, exc)

    def raise_first_fault(self) -> None:
        if self.shared.fault:
            raise Aborted

    def mark(self) -> None:
        # Without this a rank with much left to compute would stop long after the others.
        self.raise_first_fault()

    def describe(self) -> str:
        """Describe the last activity of the rank, for messages."""
        site = fault_site(self.rank, self.at)
        return f"{site} (last call: {self.last_call})" if self.last_call else site


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


class Meeting:
    """The shared side of one group: its rounds, numbered per rank in calling order."""

    def __init__(self, shared: ThreadWorld, ranks: tuple[int, ...]) -> None:
        self.shared, self.ranks = shared, ranks
        self.lock = threading.Lock()
        self.clear()

    def clear(self) -> None:
        self.rounds: dict[int, _Round] = {}
        self.counts = [0] * len(self.ranks)

    def post(self, world: ThreadRank, index: int, call: Call, payload: Any, combine: Combine) -> _Round:
        """Enter this rank's next round without blocking; the last rank to arrive computes all results."""
        with self.lock:
            number = self.counts[index]
            # A rank's n-th call of a group is the group's n-th round: ranks may be several rounds apart.
            self.counts[index] += 1
            turn = self.rounds.get(number) or self.rounds.setdefault(number, _Round(self.ranks))
            turn.calls[index], turn.payloads[index], turn.posts.at[index] = call, payload, world.at
            # The posts, not the round: the order is checked after the step, when its tensors must be free.
            self.shared.issued[world.rank].append(turn.posts)
            self._check(world, turn, index)
            is_last = None not in turn.calls
            if is_last:
                del self.rounds[number]
        if is_last:
            with torch.no_grad():
                # Outside the lock, so that other ranks can post their next calls.
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

    def __init__(self, world: ThreadRank, meeting: Meeting, index: int) -> None:
        super().__init__(meeting.ranks, index)
        self._world, self._meeting = world, meeting

    def all_reduce(self, x: torch.Tensor, site: str, op: str = "sum") -> torch.Tensor:
        return self._meet(
            f"all_reduce {op}",
            site,
            [x],
            lambda posts: _copies(_reduced([p[0] for p in posts], op), self.size),
        )

    def all_reduce_(self, x: torch.Tensor, site: str) -> torch.Tensor:
        return self._meet("all_reduce_", site, [x], _sum_in_place)  # type: ignore[no-any-return]

    def all_gather(self, x: torch.Tensor, dim: int, site: str) -> torch.Tensor:
        return self._gather("all_gather", x, dim, site).wait()  # type: ignore[no-any-return]

    def reduce_scatter(self, x: torch.Tensor, dim: int, site: str) -> torch.Tensor:
        return self._scatter("reduce_scatter", x, dim, site).wait()  # type: ignore[no-any-return]

    def all_to_all(
        self, parts: Sequence[torch.Tensor], site: str, sizes: Sequence[int] | None = None
    ) -> list[torch.Tensor]:
        def combine(posts: list[Any]) -> list[Any]:
            # Rank k gets the k-th part of every rank.
            return [_clones(column) for column in zip(*posts, strict=True)]

        if sizes is None:
            return self._meet("all_to_all", site, parts, combine)
        # Ranks send parts of other sizes.
        return self._post(("all_to_all", site, None, None), list(parts), combine).wait()

    def broadcast(self, x: torch.Tensor, source_index: int, site: str) -> torch.Tensor:
        return self._meet(
            f"broadcast from {source_index}",
            site,
            [x],
            lambda posts: _copies(posts[source_index][0], self.size),
        )

    def all_reduce_start(self, flat: torch.Tensor, site: str) -> Pending:
        return self._start("all_reduce_start", site, [flat], _sum_in_place)

    def all_gather_start(self, x: torch.Tensor, dim: int, site: str) -> Pending:
        return self._gather("all_gather_start", x, dim, site)

    def all_gather_start_(self, flat: torch.Tensor, site: str) -> Pending:
        equal_parts(flat, 0, self.size, site)
        return self._start("all_gather_start_", site, [flat], _gather_in_place)

    def _gather(self, kind: str, x: torch.Tensor, dim: int, site: str) -> Pending:
        def combine(posts: list[Any]) -> list[Any]:
            parts = [post[0] for post in posts]
            # A copy for every rank: results must not share memory.
            return [torch.cat(parts, dim) for _ in posts]

        return self._start(f"{kind} dim {dim}", site, [x], combine)

    def reduce_scatter_start(
        self, x: torch.Tensor, dim: int, site: str, sum_dtype: torch.dtype | None = None
    ) -> Pending:
        return self._scatter("reduce_scatter_start", x, dim, site, sum_dtype)

    def _scatter(
        self, kind: str, x: torch.Tensor, dim: int, site: str, sum_dtype: torch.dtype | None = None
    ) -> Pending:
        equal_parts(x, dim, self.size, site)

        def combine(posts: list[Any]) -> list[Any]:
            columns = zip(*(post[0].tensor_split(self.size, dim) for post in posts), strict=True)
            return [sum_in_order(column, sum_dtype) for column in columns]

        return self._start(f"{kind} dim {dim}", site, [x], combine)

    def gather_objects(self, obj: Any, site: str) -> list[Any]:
        pending = self._post(
            ("gather_objects", site, None, None), obj, lambda objects: [list(objects) for _ in objects]
        )
        return pending.wait()  # type: ignore[no-any-return]

    def _meet(self, kind: str, site: str, tensors: Sequence[torch.Tensor], combine: Combine) -> Any:
        return self._start(kind, site, tensors, combine).wait()

    def _start(self, kind: str, site: str, tensors: Sequence[torch.Tensor], combine: Combine) -> Pending:
        return self._post((kind, site, *shapes_and_dtypes(tensors)), list(tensors), combine)

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
        # No lock is needed if the round is complete.
        if world.shared.fault or not turn.complete.is_set():
            world.shared.wait(turn.complete, world, self._what, lambda: meeting.missing(turn))
        return turn.results[self._group.index]

    def is_done(self) -> bool:
        return self._turn.complete.is_set()


class _Round:
    """A pending collective call: the results are available once all posts have arrived."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.posts = _Posts(ranks)
        self.calls = self.posts.calls
        self.payloads: list[Any] = [None] * len(ranks)
        self.results: list[Any] = []
        self.complete = threading.Event()


class _Posts:
    """The posts of a group's ranks in one call, without tensors: kept to check the order."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.calls: list[Call | None] = [None] * len(ranks)
        # The action that each rank was executing.
        self.at: list[str] = [""] * len(ranks)

    def text(self, rank: int) -> str:
        index = self.ranks.index(rank)
        return f"{fault_site(rank, self.at[index])} makes {_call_text(self.calls[index])}"


def _reduced(tensors: Sequence[torch.Tensor], op: str = "sum") -> torch.Tensor:
    """Return the sum or maximum, in rank order, as a new contiguous tensor."""
    if op == "sum":
        return sum_in_order(tensors)
    total = tensors[0].clone(memory_format=torch.contiguous_format)
    for x in tensors[1:]:
        torch.maximum(total, x, out=total)
    return total


def _sum_in_place(posts: list[list[torch.Tensor]]) -> list[Any]:
    total = _reduced([post[0] for post in posts])
    return [post[0].copy_(total) for post in posts]


def _gather_in_place(posts: list[list[torch.Tensor]]) -> list[Any]:
    ranges = [post[0].tensor_split(len(posts)) for post in posts]
    for own, parts in enumerate(ranges):
        for other, part in enumerate(parts):
            if other != own:
                part.copy_(ranges[other][other])
    return [post[0] for post in posts]


def _clones(parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [part.clone() for part in parts]


def _copies(x: torch.Tensor, count: int) -> list[torch.Tensor]:
    return [x.clone(memory_format=torch.contiguous_format) for _ in range(count)]


class Pipe:
    """The shared side of one channel: messages numbered in sending order, and the event of each."""

    def __init__(self, source: int) -> None:
        self.source = source
        self.lock = threading.Lock()
        self.clear()

    def clear(self) -> None:
        self.sent, self.received = 0, 0
        self.messages: dict[int, tuple[list[torch.Tensor], str]] = {}
        self.arrivals: dict[int, threading.Event] = {}

    def put(self, tensors: list[torch.Tensor], site: str) -> None:
        with self.lock:
            self.messages[self.sent] = (tensors, site)
            # Sender and receiver come in any order: the first one makes the event of a message.
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

    def __init__(self, world: ThreadRank, pipe: Pipe) -> None:
        self._world, self._pipe = world, pipe

    def send(self, tensors: Sequence[torch.Tensor], site: str) -> Pending:
        self._world.last_call = f"send {site!r}"
        # Copies: the sender may free or overwrite its tensors, and the receiver must not share their memory.
        self._pipe.put([x.detach().clone() for x in tensors], site)
        return Done()

    def receive(self, like: Sequence[Like], site: str) -> Pending:
        return _Receipt(self._world, self._pipe, like, site)


class _Receipt(Pending):
    """A posted receive: the n-th posted takes the n-th message."""

    def __init__(self, world: ThreadRank, pipe: Pipe, like: Sequence[Like], site: str) -> None:
        self._world, self._pipe, self._site = world, pipe, site
        self._like = ([tuple(shape) for shape, _ in like], [dtype for _, dtype in like])
        # The number is taken now, not in `wait`: receives match sends in the order in which they were posted.
        self._number, self._event = pipe.next_arrival()
        self._tensors: list[torch.Tensor] | None = None

    def wait(self) -> list[torch.Tensor]:
        if self._tensors is None:
            world, source = self._world, self._pipe.source
            world.last_call = f"receive {self._site!r} from rank {source}"
            # After a fault nothing is handed out, not even what has arrived: `wait` raises Aborted.
            if world.shared.fault or not self._event.is_set():
                world.shared.wait(self._event, world, world.last_call, lambda: [source])
            tensors, sent_as = self._pipe.take(self._number)
            if shapes_and_dtypes(tensors) != self._like:
                raise RuntimeFault(
                    fault_site(world.rank, world.at),
                    f"receives {self._site!r} as {self._like}, but rank {source} sent {sent_as!r} as "
                    f"{shapes_and_dtypes(tensors)}",
                    "both ends of a channel must name the same tensors in the same order",
                )
            self._tensors = tensors
        return self._tensors

    def is_done(self) -> bool:
        return self._tensors is not None or self._event.is_set()


def shapes_and_dtypes(tensors: Sequence[torch.Tensor]) -> tuple[list[tuple[int, ...]], list[torch.dtype]]:
    return [tuple(x.shape) for x in tensors], [x.dtype for x in tensors]


def _call_text(call: Call | None) -> str:
    if call is None:
        return "nothing"
    kind, site, shapes, dtypes = call
    if not shapes:
        return f"{kind} {site!r}"
    pairs = zip(shapes, dtypes, strict=True)
    sizes = ", ".join(f"{list(shape)} {str(dtype).removeprefix('torch.')}" for shape, dtype in pairs)
    return f"{kind} {site!r} of {sizes}"
