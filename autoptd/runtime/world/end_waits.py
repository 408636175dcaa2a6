"""End the pending calls of a gloo group from another thread than the waiting one.

Gloo groups cannot be aborted (torch 2.11 to 2.13: their `abort` does nothing). But when a receive times out,
gloo drops all connections of the group, and every call on them fails on both ends. So a receive is posted
that no rank sends to. (Delete this file when `ProcessGroup.abort` ends waits over gloo.)

    end_waits([group], rank=0)
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

# A tag that no message uses.
TAG = 2**30


def end_waits(groups: Sequence[dist.ProcessGroup], rank: int) -> None:
    """Make all pending and later calls of these groups fail; `rank` is this process's."""
    for group in list(groups):
        peer = next(other for other in dist.get_process_group_ranks(group) if other != rank)
        # The call fails as intended, or the connections are already gone.
        with suppress(RuntimeError, ValueError):
            work = dist.irecv(torch.empty(1, device="cpu"), peer, group=group, tag=TAG)
            if work is not None:
                work.wait(timedelta(milliseconds=1))


__all__ = ["end_waits"]
