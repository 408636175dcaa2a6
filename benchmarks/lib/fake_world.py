"""A default process group of which only this rank exists: what it costs a rank to be one of many, and no other rank.

fake_process_group(rank=1, world_size=3072)     # collectives hand back local data
"""

from __future__ import annotations

import torch.distributed as dist


def fake_process_group(rank: int, world_size: int) -> None:
    """Make the group."""
    import torch.testing._internal.distributed.fake_pg  # noqa: F401 - registers the backend

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=dist.HashStore())
