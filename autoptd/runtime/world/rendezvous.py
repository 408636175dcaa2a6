"""How the processes of a launch find each other: the backend, and the default process group from torchrun's
environment.

In: the device of this process. Out: the backend's name; the store of the launch; and torch's default process group, made.

    backend = default_backend(torch.device("cuda", 0))                                    # "nccl"
    store = store_of_group(timeout=300.0)
    init_default_group(backend, store, group_limit=timedelta(seconds=330))
"""

from __future__ import annotations

import os
import socket
import threading
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from autoptd.compat import default_store, env_store
from autoptd.errors import PlanError

Result = TypeVar("Result")
# Seconds between two looks at signals.
LISTENS = 0.5
WANTED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# The stores of this process, by what names them, and how many default groups it has made in each.
_STORES: dict[tuple[object, ...], dist.Store] = {}
_MADE: Counter[tuple[object, ...]] = Counter()
# Default groups that were made here, with how many worlds use them.
_USERS: list[tuple[dist.ProcessGroup | None, list[int]]] = []


def default_backend(device: torch.device) -> str:
    """Return NCCL on CUDA, gloo elsewhere.

    An existing default group of a third kind (a vendor's, torch's fake one) is followed.
    """
    existing = dist.get_backend() if dist.is_initialized() else "undefined"
    # A text with ":" is a choice per device, "cpu:gloo,cuda:nccl", from which ours is made below.
    if existing not in ("undefined", "gloo", "nccl") and ":" not in existing:
        return existing
    return "nccl" if device.type == "cuda" else "gloo"


def own_place() -> tuple[int, int]:
    """Return the rank of this process, and how many there are."""
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    _named()
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def store_from_env(timeout: float) -> dist.Store:
    """Return the store that the processes of a launch share, of this attempt of torchrun's.

    It lives as long as the process: rank 0 may serve it. Waits for its host in Python, so that Ctrl-C ends that.
    """
    named = _named()
    limit = timedelta(seconds=timeout)
    if named not in _STORES:
        _STORES[named] = _in_thread(lambda: env_store(limit)[0])
    _STORES[named].set_timeout(limit)
    # Torchrun's restarts share one store.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"attempt {attempt}", _STORES[named])


def store_of_group(timeout: float) -> dist.Store:
    """Return the store of the next default group that this process makes.

    Each takes its own prefix, or a rank reads the address of one that is closed.
    """
    store, named = store_from_env(timeout), _named()
    # All ranks of a store make all of its groups, so that each counts alike.
    _MADE[named] += 1
    return dist.PrefixStore(f"group {_MADE[named]}", store)


def init_default_group(backend: str, store: dist.Store, group_limit: timedelta) -> None:
    """Make the default process group; all ranks have arrived."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=group_limit)
    # It keeps `store` with another prefix: the next world would have this one's number, and its groups their names.
    count_world(default_store(), rank)
    _USERS[:] = [(dist.group.WORLD, [0])]


def count_world(store: dist.Store, rank: int) -> int:
    """Return the number of a rank's new world among those of a default group, from 1: each rank makes all of them."""
    return store.add(f"autoptd worlds of rank {rank}", 1)


def use_default_group() -> None:
    """Count one more world that uses the default group, where it was made here."""
    for count in _users():
        count[0] += 1


def leave_default_group() -> None:
    """Count one world less, and end the default group after the last one, where it was made here."""
    for count in _users():
        count[0] -= 1
        if count[0] == 0:
            dist.destroy_process_group()
            _USERS.clear()


def _users() -> list[list[int]]:
    return [count for group, count in _USERS if group is dist.group.WORLD]


def is_served(seconds: float) -> bool:
    """Tell whether this process was started by a launcher and the host of its store answers."""
    if any(name not in os.environ for name in WANTED):
        return False
    try:
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        socket.create_connection(address, timeout=seconds).close()
    except (OSError, ValueError):
        return False
    return True


def _named() -> tuple[object, ...]:
    missing = [name for name in WANTED if name not in os.environ]
    if missing:
        fact = f"{', '.join(missing)} not set"
        raise PlanError("torch.distributed", fact, "start with torchrun, or use backend='local'")
    return (os.getpid(), *(os.environ[name] for name in WANTED))


def _in_thread(act: Callable[[], Result]) -> Result:
    """Return what `act` returns, or raise what it raises, as the main thread listens to signals."""
    found: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()

    def run() -> None:
        try:
            found.put((act(), None))
        except BaseException as exc:
            found.put((None, exc))

    thread = threading.Thread(target=run, name="rendezvous", daemon=True)
    thread.start()
    # A signal that another thread receives does not wake up this one.
    while thread.is_alive():
        thread.join(LISTENS)
    result, error = found.get()
    if error is not None:
        raise error
    return result  # type: ignore[no-any-return]


__all__ = [
    "default_backend",
    "init_default_group",
    "is_served",
    "own_place",
    "store_from_env",
    "store_of_group",
]
