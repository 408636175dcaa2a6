"""Differences between torch releases (2.11 to 2.13), and every private import, in one place."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

__all__ = ["FakeTensorMode", "TorchDispatchMode", "default_store", "env_store"]
__all__ += ["tree_flatten", "tree_leaves", "tree_map", "tree_unflatten"]


def env_store(timeout: timedelta) -> tuple[dist.Store, int, int]:
    """Return (store, rank, world size) of the rendezvous that RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT name."""
    from torch.distributed.rendezvous import rendezvous  # the module; its name in the package is ambiguous

    return next(rendezvous("env://", timeout=timeout))  # type: ignore[no-any-return]


def default_store() -> dist.Store:
    """Return the store of the default process group (torch has no public accessor)."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()
