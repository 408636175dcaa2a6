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

# The stores of this process, by what names them, and how many default groups it has made in each.
_STORES: dict[tuple[object, ...], dist.Store] = {}
_MADE: Counter[tuple[object, ...]] = Counter()


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
    takes its own prefix, or a rank reads the address of one that is closed. The store lives as long as the
    process: rank 0 serves it, and a rank that is a step ahead would find the old one, about to end.
    """
    wanted = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in wanted if name not in os.environ]
    if missing:
        fact = f"{', '.join(missing)} not set"
        raise PlanError("torch.distributed", fact, "start with torchrun, or use backend='local'")
    named = (os.getpid(), *(os.environ[name] for name in wanted))
    limit = timedelta(seconds=timeout)
    if named not in _STORES:
        _STORES[named] = env_store(limit)[0]
    _STORES[named].set_timeout(limit)
    # All ranks of a store make all of its groups, so that each counts alike.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"attempt {attempt} group {_MADE[named]}", _STORES[named])
    _MADE[named] += 1
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=group_limit)


__all__ = ["default_backend", "init_from_env"]
