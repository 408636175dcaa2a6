"""Let the processes of a launch find each other through its store, and report those that exit early.

In: the environment that torchrun or Slurm sets, the device of this process. Out: the backend's name, the store of
the launch, torch's default process group; and a message in the store when a process ends before it has met the
others, which they poll.

    tell_at_exit()                                      # once, by `parallelize`: from here on others wait for this rank
    backend = default_backend(torch.device("cuda", 0))  # "nccl"
    store = store_of_group(timeout=300.0)
    stop_telling()                                      # a `FaultBoard` has taken over
    first_that_left(store)                              # (3, "KeyboardInterrupt"); None if no rank has left
    init_default_group(backend, store, group_limit=timedelta(seconds=330))
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from multiprocessing.util import Finalize
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from autoptd.compat import default_store
from autoptd.errors import PlanError, RuntimeFault
from autoptd.runtime.world.slurm import join_slurm_step

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
    rank, size = int_from_env("RANK"), int_from_env("WORLD_SIZE")
    if not 0 <= rank < size:
        raise PlanError(
            f"RANK={rank}", f"is not below WORLD_SIZE={size}", "a different RANK for each process, from 0"
        )
    return rank, size


def int_from_env(name: str) -> int:
    """Return the number in an environment variable; PlanError if it is not a number."""
    try:
        return int(os.environ[name])
    except ValueError:
        raise PlanError(f"{name}={os.environ[name]!r}", "is not a number", "start with torchrun") from None


def launched_ranks() -> int | None:
    """Return the number of processes of the launch, None for a process by itself."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return int_from_env("WORLD_SIZE") if "WORLD_SIZE" in os.environ else None


def join_launch(backend: str | None) -> None:
    """Find the place of this process in a launch by Slurm, unless ranks are threads or the process group exists."""
    if backend != "local" and not (dist.is_available() and dist.is_initialized()):
        join_slurm_step(os.environ)


def store_from_env(timeout: float) -> dist.Store:
    """Return the store that the processes of a launch share, for the current attempt of torchrun.

    It is kept until the process exits, since rank 0 may host it.
    """
    named = _named()
    limit = timedelta(seconds=timeout)
    if named not in _STORES:
        _STORES[named] = connect(timeout)
    _STORES[named].set_timeout(limit)
    # Restarts by torchrun share one store.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"attempt {attempt}", _STORES[named])


def connect(timeout: float) -> dist.Store:
    """Connect to the store of torchrun's agent or of rank 0; unlike torch's default, do not wait for all ranks.

    RuntimeFault if the address is in use, or does not answer as a store for `timeout` seconds.
    """
    rank, size = int_from_env("RANK"), int_from_env("WORLD_SIZE")
    is_hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    address, port = os.environ["MASTER_ADDR"], int_from_env("MASTER_PORT")
    is_host, limit = rank == 0 and not is_hosted, timedelta(seconds=timeout)
    make = partial(
        dist.TCPStore, address, port, size, is_host, limit, wait_for_workers=False, multi_tenant=True
    )
    try:
        # Another program that listens there may never answer.
        return _in_thread(make, timeout + PATIENCE)
    except (RuntimeError, TimeoutError, ValueError, TypeError) as error:
        host = "torchrun's agent" if is_hosted else "rank 0"
        reason = str(error).splitlines()[0][:200]
        raise RuntimeFault(
            f"rank {rank} at start",
            f"the store of {host} at {address}:{port} does not answer for {timeout:g} s ({reason})",
            "check that it is running, that MASTER_ADDR and MASTER_PORT are right, that no other program uses this port, "
            "and that no firewall blocks it",
        ) from error


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


def _in_thread(act: Callable[[], Result], seconds: float) -> Result:
    """Run `act` in a thread, and return or raise its result, while the main thread handles signals.

    TimeoutError if it takes longer than `seconds`; the thread may then stay.
    """
    found: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()

    def run() -> None:
        try:
            found.put((act(), None))
        except BaseException as exc:
            found.put((None, exc))

    thread = threading.Thread(target=run, name="rendezvous", daemon=True)
    thread.start()
    # A signal that another thread receives does not wake up this one.
    deadline = time.monotonic() + seconds
    while thread.is_alive():
        if time.monotonic() > deadline:
            raise TimeoutError("no answer")
        thread.join(LISTENS)
    result, error = found.get()
    if error is not None:
        raise error
    return result  # type: ignore[no-any-return]


LEFT = "autoptd: left before it arrived"
# Seconds that an exiting process waits for the store.
PATIENCE = 2.0
# Seconds in which the first process of a node prints its error.
TELLING = 5.0
# Folders of files that are not the user's.
LIBRARIES = tuple(str(folder) + os.sep for folder in (Path(torch.__file__).parent, Path(__file__).parents[2]))


def cause_of_end() -> str:
    """Return a summary of the uncaught exception that ends this process; "" after a normal exit or
    `sys.exit`.
    """
    # Set by Python before it prints an uncaught exception; `last_exc` from 3.12 on.
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if error is None:
        return ""
    return in_short(error)


def in_short(error: BaseException, *, whole: bool = False) -> str:
    """Return class, first line (or `whole` text) and place of an exception, in case its rank is killed."""
    text = str(error).strip() if whole else str(error).strip().partition("\n")[0]
    name, place = type(error).__name__, _place(error)
    return name + (f": {text}" if text else "") + (f" ({place})" if place else "")


def _place(error: BaseException) -> str:
    """Return the innermost user or emitted line that raised an exception: "train.py:35"."""
    place, trace = "", error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not file.startswith(LIBRARIES):
            place = f"{os.path.basename(file)}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place


def stay_for(seconds: float, store: dist.Store) -> None:
    """Keep this process, which may host `store`, alive for `seconds` from now; it waits only at its exit."""
    # Processes that multiprocessing starts skip atexit.
    Finalize(None, _stay_until, (time.monotonic() + seconds, store), exitpriority=0)


def _stay_until(moment: float, store: dist.Store) -> None:
    time.sleep(max(moment - time.monotonic(), 0.0))


def tell_at_exit() -> None:
    """Let the other ranks know if this process, one of those of a launch, ends before it has met them."""
    stop_telling()
    atexit.register(_tell)


def stop_telling() -> None:
    atexit.unregister(_tell)


def _tell() -> None:
    # If the store cannot be reached, this process just exits.
    with suppress(Exception):
        if dist.is_initialized():
            store, rank = default_store(), dist.get_rank()
        elif is_served(PATIENCE):
            store, rank = store_from_env(PATIENCE), int(os.environ["RANK"])
        else:
            return
        store.compare_set(LEFT, "", json.dumps([rank, cause_of_end() or "its script has ended"]))


@contextmanager
def told_once(text: str) -> Iterator[bool]:
    """Yield whether this process is the first of its node to print `text`; the others exit only after it has.

    A launcher ends all processes when the first one exits: that must not happen before the text is printed.
    Yield True without a store.
    """
    key = (
        f"autoptd: node {os.environ.get('GROUP_RANK', '0')} tells {hashlib.sha256(text.encode()).hexdigest()}"
    )
    own, teller, store = os.environ.get("RANK", "0"), None, None
    with suppress(Exception):
        if is_served(PATIENCE):
            store = store_from_env(PATIENCE)
            teller = store.compare_set(key, "", own).decode()
    is_own = teller is None or teller == own
    yield is_own
    with suppress(Exception):
        if store is not None and is_own:
            store.set(f"{key}: done", "")
        elif store is not None:
            deadline = time.monotonic() + TELLING
            while not store.check([f"{key}: done"]) and time.monotonic() < deadline:
                time.sleep(0.02)


def first_that_left(store: dist.Store) -> tuple[int, str] | None:
    """Return the rank that left before it arrived, and why; the first one, None where there is none."""
    if not store.check([LEFT]):
        return None
    rank, why = json.loads(store.get(LEFT))
    return int(rank), str(why)
