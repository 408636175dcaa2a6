"""Short texts that processes leave for each other, without a collective: for threads that run during
training.

In: a world. Out: a mailbox that one thread of this process uses; nothing in it waits for another process.

    box = mailbox_of(world, "checkpoints")
    box.put("outcome", "")                           # elsewhere: box.get("outcome") is None until then
    box.add("ended"); box.count("ended")
"""

from __future__ import annotations

from typing import Protocol

import torch.distributed as dist

from autoptd.runtime.world.processes import DistributedWorld
from autoptd.runtime.world.world import World


class Mailbox(Protocol):
    """Texts and counts by key, the same for all processes."""

    def put(self, key: str, text: str) -> None: ...

    def get(self, key: str) -> str | None: ...

    def add(self, key: str) -> None: ...

    def count(self, key: str) -> int: ...


class OwnMailbox:
    """Of a process that is alone."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}
        self._counts: dict[str, int] = {}

    def put(self, key: str, text: str) -> None:
        self._texts[key] = text

    def get(self, key: str) -> str | None:
        return self._texts.get(key)

    def add(self, key: str) -> None:
        self._counts[key] = self.count(key) + 1

    def count(self, key: str) -> int:
        return self._counts.get(key, 0)


class StoreMailbox:
    """In a key-value store; a request does not end where the store's host does not answer."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store

    def put(self, key: str, text: str) -> None:
        self._store.set(key, text)

    def get(self, key: str) -> str | None:
        return self._store.get(key).decode() if self._store.check([key]) else None

    def add(self, key: str) -> None:
        self._store.add(key, 1)

    def count(self, key: str) -> int:
        return int(self._store.add(key, 0))


def mailbox_of(world: World, name: str) -> Mailbox:
    """Return the mailbox of this name that all processes of a world share."""
    return StoreMailbox(world.new_store(name)) if isinstance(world, DistributedWorld) else OwnMailbox()


__all__ = ["Mailbox", "OwnMailbox", "StoreMailbox", "mailbox_of"]
