"""How the processes of a launch find each other: the backend, and the default process group from torchrun's
environment.

In: the device of this process. Out: the backend's name; and torch's default process group, made.

    backend = default_backend(torch.device("cuda", 0))                                    # "nccl"
    init_from_env(backend, timeout=300.0, group_limit=timedelta(seconds=330))
"""

from __future__ import annotations

import os
from collections import Counter
from datetime import timedelta

import torch
import torch.distributed as dist

from autoptd.compat import env_store
from autoptd.errors import PlanError

# How many default groups this process has made, by the address of the store.
_MADE: Counter[str] = Counter()


def default_backend(device: torch.device) -> str:
    """Return NCCL on CUDA, gloo elsewhere.

    An existing default group of a third kind (a vendor's, torch's fake one) is followed.
    """
    existing = dist.get_backend() if dist.is_initialized() else "undefined"
    # A text with ":" is a choice per device, "cpu:gloo,cuda:nccl", from which ours is made below.
    if existing not in ("undefined", "gloo", "nccl") and ":" not in existing:
        return existing
    return "nccl" if device.type == "cuda" else "gloo"


def init_from_env(backend: str, timeout: float, group_limit: timedelta) -> None:
    """Make the default process group.

    Torchrun's restarts share one store, and so do the groups that a process makes one after the other: each
    takes its own prefix, or a rank reads the address of one that is closed.
    """
    wanted = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in wanted if name not in os.environ]
    if missing:
        fact = f"{', '.join(missing)} not set"
        raise PlanError("torch.distributed", fact, "start with torchrun, or use backend='local'")
    store, rank, size = env_store(timedelta(seconds=timeout))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    # All ranks of a store make all of its groups, so that each counts alike.
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    store = dist.PrefixStore(f"attempt {attempt} group {_MADE[address]}", store)
    _MADE[address] += 1
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=group_limit)


__all__ = ["default_backend", "init_from_env"]
