"""What a process tells the other ranks as it ends: also one that ends before it has come to them.

In: why the interpreter ends, as Python has it. Out: a word in the store of the launch, where ranks that wait for this one
look.

    tell_at_exit()                          # once for all, by `parallelize`: from here on other ranks wait for this one
    stop_telling()                          # there is a `FaultBoard` now, which does so itself
    first_that_left(store)                  # (3, "KeyboardInterrupt"); None where nobody has left
"""

from __future__ import annotations

import atexit
import json
import os
import sys
from contextlib import suppress

import torch.distributed as dist

from autoptd.compat import default_store
from autoptd.runtime.world.rendezvous import is_served, store_from_env

LEFT = "autoptd: left before it arrived"
# Seconds that the store has to answer a process that ends.
PATIENCE = 2.0


def cause_of_end() -> str:
    """Return the uncaught exception that ends this process, in short; "" where its script has ended, or by `sys.exit`."""
    # Set by Python before it shows an exception that nobody has caught; `last_exc` from 3.12 on.
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if error is None:
        return ""
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def tell_at_exit() -> None:
    """Let the other ranks know if this process, one of those of a launch, ends before it has met them."""
    stop_telling()
    atexit.register(_tell)


def stop_telling() -> None:
    atexit.unregister(_tell)


def _tell() -> None:
    # Nobody listens, or nobody could be told: then this process just ends.
    with suppress(Exception):
        if dist.is_initialized():
            store, rank = default_store(), dist.get_rank()
        elif is_served(PATIENCE):
            store, rank = store_from_env(PATIENCE), int(os.environ["RANK"])
        else:
            return
        store.compare_set(LEFT, "", json.dumps([rank, cause_of_end() or "its script has ended"]))


def first_that_left(store: dist.Store) -> tuple[int, str] | None:
    """Return the rank that left before it arrived, and why; the first one, None where there is none."""
    if not store.check([LEFT]):
        return None
    rank, why = json.loads(store.get(LEFT))
    return int(rank), str(why)


__all__ = ["cause_of_end", "first_that_left", "stop_telling", "tell_at_exit"]
