"""Tell when a send over gloo has completed: its operations tell only a thread that waits for them, so one
does.

In: the sends of a channel. Out: a `WatchedSend` each, done as soon as the tensors may be let go. Without it a
rank would hold all that it sent until the end of the step: `isend(...).is_completed()` is False on gloo until
`wait()` was called, which blocks. (torch 2.11 to 2.13. Delete this file when gloo's work can be asked.)

    watcher = SendWatcher("channel 0 -> 1")
    sent = watcher.add([dist.isend(x, 1)], [x])
    sent.is_completed()
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any

import torch


class WatchedSend:
    """Sends under way, asked like a `Work` of torch.distributed; they keep their tensors alive."""

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
    """The sends of one channel in order, and the thread that waits for them; it starts with the first."""

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
