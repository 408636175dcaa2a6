"""End what a group over gloo has under way, from another thread than the one that waits for it.

Gloo's groups cannot be aborted (torch 2.11 to 2.13: `abort` of theirs does nothing). But where a receive is not over in its
time, gloo gives up all connections of the group, and every call on them fails on both ends. So one is started that nobody
sends to. (Delete this file when `ProcessGroup.abort` ends waits over gloo.)

    end_waits([group], rank=0)
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

# No message has it.
TAG = 2**30


def end_waits(groups: Sequence[dist.ProcessGroup], rank: int) -> None:
    """Let all calls of these groups fail, those under way and later ones; `rank` is this process's."""
    for group in list(groups):
        peer = next(other for other in dist.get_process_group_ranks(group) if other != rank)
        # It is what is wanted, or has happened already.
        with suppress(RuntimeError, ValueError):
            work = dist.irecv(torch.empty(1, device="cpu"), peer, group=group, tag=TAG)
            if work is not None:
                work.wait(timedelta(milliseconds=1))


__all__ = ["end_waits"]
