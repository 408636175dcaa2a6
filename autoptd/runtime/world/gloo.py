"""Two things that gloo's operations lack: ending a pending call, and telling when a send has completed.

In: the groups, or the sends of a channel, of this process. Delete either part once torch has it (2.11 to 2.13 have not).

    end_waits([group], rank=0)                          # from another thread than the waiting one
    sent = SendWatcher("channel 0 -> 1").add([dist.isend(x, 1)], [x])
    sent.is_completed()
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

# A tag that no message uses.
TAG = 2**30


def end_waits(groups: Sequence[dist.ProcessGroup], rank: int) -> None:
    """Make all pending and later calls of these groups fail; `rank` is this process's.

    `ProcessGroup.abort` does nothing for gloo. But when a receive times out, gloo drops all connections of the group,
    and every call on them fails on both ends. So a receive is posted that no rank sends to.
    """
    for group in list(groups):
        peer = next(other for other in dist.get_process_group_ranks(group) if other != rank)
        # The call fails as intended, or the connections are already gone.
        with suppress(RuntimeError, ValueError):
            work = dist.irecv(torch.empty(1, device="cpu"), peer, group=group, tag=TAG)
            if work is not None:
                work.wait(timedelta(milliseconds=1))


class WatchedSend:
    """Pending sends, with the methods of a `Work` of torch.distributed; they keep their tensors alive."""

    def __init__(self, works: Sequence[Any], tensors: Sequence[torch.Tensor]) -> None:
        self._works, self._tensors = list(works), list(tensors)
        self._completed = threading.Event()
        self._fault: BaseException | None = None

    def is_completed(self) -> bool:
        return self._completed.is_set()

    def wait(self) -> None:
        """Block until all have completed; raise what went wrong."""
        self._completed.wait()
        if self._fault is not None:
            raise self._fault

    def follow(self) -> None:
        """Wait for the sends, then let go of them; called by the one thread that does."""
        try:
            for work in self._works:
                work.wait()
        # Raised again by `wait`, in the thread that asks.
        except BaseException as exc:
            self._fault = exc
        self._works, self._tensors = [], []
        self._completed.set()


class SendWatcher:
    """The sends of one channel in order, and the thread that waits for them; it starts with the first.

    `isend(...).is_completed()` is False on gloo until `wait()` was called, which blocks: without the thread, a rank would
    hold everything that it sent until the end of the step.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: SimpleQueue[WatchedSend | None] | None = None

    def add(self, works: Sequence[Any], tensors: Sequence[torch.Tensor]) -> WatchedSend:
        """Follow some sends that were started."""
        if self._queue is None:
            self._queue = SimpleQueue()
            # A daemon: a send that never completes must not keep the process from ending.
            threading.Thread(target=_follow, args=(self._queue,), name=self._name, daemon=True).start()
        sent = WatchedSend(works, tensors)
        self._queue.put(sent)
        return sent

    def close(self) -> None:
        """End the thread after the sends that were queued."""
        if self._queue is not None:
            self._queue.put(None)
            self._queue = None


def _follow(queue: SimpleQueue[WatchedSend | None]) -> None:
    while (sent := queue.get()) is not None:
        sent.follow()
        # Nothing is held while waiting for the next one.
        del sent
