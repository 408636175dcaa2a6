"""A default process group of which only this rank exists: what it costs a rank to be one of many, and no other rank.

fake_process_group(rank=1, world_size=3072)     # collectives hand back local data
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from autoptd.compat import gather_into
from autoptd.runtime.world import processes


def fake_process_group(rank: int, world_size: int) -> None:
    """Make the group."""
    import torch.testing._internal.distributed.fake_pg  # noqa: F401 - registers the backend

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=dist.HashStore())
    processes.gather_into = _gather_into
    # Nobody else comes.
    processes.meet = lambda *_: None


def _gather_into(handle: dist.ProcessGroup, whole: Tensor, x: Tensor, is_async: bool) -> Any:
    """Gather by one copy, as NCCL does by one kernel: torch's fake group copies for one rank after the other."""
    if dist.get_backend(handle) != "fake":
        return gather_into(handle, whole, x, is_async)
    whole.view(-1, *x.shape).copy_(x)
    return _Copied()


class _Copied:
    """What torch.distributed hands out for an operation, of one that is done: the copy is queued on the current stream."""

    def wait(self) -> None:
        pass

    def is_completed(self) -> bool:
        return True
