"""Choose the backend, and create the default process group from torchrun's environment.

In: the device of this process. Out: the backend's name; the store of the launch; and torch's default process
group.

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
# Seconds between two checks for signals.
LISTENS = 0.5
WANTED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# The stores of this process, by their addresses, and the number of default groups made in each.
_STORES: dict[tuple[object, ...], dist.Store] = {}
_MADE: Counter[tuple[object, ...]] = Counter()
# Default groups that were created here, with the number of worlds that use them.
_USERS: list[tuple[dist.ProcessGroup | None, list[int]]] = []


def default_backend(device: torch.device) -> str:
    """Return NCCL on CUDA and gloo elsewhere, unless an existing group has another backend."""
    existing = dist.get_backend() if dist.is_initialized() else "undefined"
    # A name with ":" is a choice per device, "cpu:gloo,cuda:nccl", from which ours is made below.
    if existing not in ("undefined", "gloo", "nccl") and ":" not in existing:
        return existing
    return "nccl" if device.type == "cuda" else "gloo"


def own_place() -> tuple[int, int]:
    """Return the rank of this process and the number of processes."""
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    _named()
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def store_from_env(timeout: float) -> dist.Store:
    """Return the store that the processes of a launch share, for the current attempt of torchrun.

    It is kept until the process exits, since rank 0 may host it. Wait for its host in Python, so that Ctrl-C
    works.
    """
    named = _named()
    limit = timedelta(seconds=timeout)
    if named not in _STORES:
        _STORES[named] = _in_thread(lambda: env_store(limit)[0])
    _STORES[named].set_timeout(limit)
    # Restarts by torchrun share one store.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"attempt {attempt}", _STORES[named])


def store_of_group(timeout: float) -> dist.Store:
    """Return the store of the next default group that this process creates.

    Each uses a different prefix; otherwise a rank could read the address of a closed group.
    """
    store, named = store_from_env(timeout), _named()
    # All ranks of a store create all of its groups, so their counts agree.
    _MADE[named] += 1
    return dist.PrefixStore(f"group {_MADE[named]}", store)


def init_default_group(backend: str, store: dist.Store, group_limit: timedelta) -> None:
    """Create the default process group, after all ranks have arrived."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=group_limit)
    # It keeps `store` under another prefix; otherwise the next world would reuse the number and group names.
    count_world(default_store(), rank)
    _USERS[:] = [(dist.group.WORLD, [0])]


def count_world(store: dist.Store, rank: int) -> int:
    """Return the number, from 1, of a new world of a default group; every rank creates all of them."""
    return store.add(f"autoptd worlds of rank {rank}", 1)


def use_default_group() -> None:
    """Count another user of the default group if it was created here."""
    for count in _users():
        count[0] += 1


def leave_default_group() -> None:
    """Remove a user of the default group, and destroy it after the last one if it was created here."""
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
    """Run `act` in a thread, and return or raise its result, while the main thread handles signals."""
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
