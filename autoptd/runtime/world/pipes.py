"""Messages between rank threads: a pipe for every channel, and the two ends of it.

In: tensors of the sender. Out: the same at the receiver, in order; a message of another site, shape or dtype
than the receiver expects is a fault that names both ranks.

    pipe = Pipe(shared, source=0, target=1)
    ThreadChannel(world_0, pipe).send([x], "F0.0")
    (x,) = ThreadChannel(world_1, pipe).receive([(x.shape, x.dtype)], "F0.0").wait()
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from autoptd.errors import RuntimeFault
from autoptd.runtime.world.exchange import Shared, ThreadRank, shapes_and_dtypes
from autoptd.runtime.world.world import Channel, Done, Like, Pending, fault_site


class Pipe:
    """The shared side of one channel: messages numbered in sending order, and who waits for which."""

    def __init__(self, shared: Shared, source: int, target: int) -> None:
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
