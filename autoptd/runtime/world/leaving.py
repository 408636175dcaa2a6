"""Report the exit of a process to the other ranks, even if it exits before it has joined them.

In: the exception that ends the interpreter. Out: a message in the store of the launch, which ranks that wait
for this one poll.

    tell_at_exit()                          # once, by `parallelize`: from here on others wait for this rank
    stop_telling()                          # a `FaultBoard` has taken over
    with told_once(str(error)) as is_own:   # one process of the node prints it
        ...
    first_that_left(store)                  # (3, "KeyboardInterrupt"); None if no rank has left
    in_short(exc)                           # "ValueError: bad row (train.py:35)"
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.util import Finalize
from pathlib import Path

import torch
import torch.distributed as dist

from autoptd.compat import default_store
from autoptd.runtime.world.rendezvous import is_served, store_from_env

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


__all__ = [
    "cause_of_end",
    "first_that_left",
    "in_short",
    "stay_for",
    "stop_telling",
    "tell_at_exit",
    "told_once",
]
