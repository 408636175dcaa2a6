"""Wait for all ranks in Python before torch does, so that Ctrl-C or the exit of another rank ends the wait.

In: this rank's board. Out: nothing, once every rank has a board; or a RuntimeFault that names the missing
ranks. torch then waits only briefly when it creates groups; only a timeout can end those waits.

    meet(board, world, words)
"""

from __future__ import annotations

import time

import torch.distributed as dist

from autoptd.errors import RuntimeFault
from autoptd.runtime.world.faults import FaultBoard
from autoptd.runtime.world.leaving import first_that_left
from autoptd.runtime.world.world import World, fault_site

# Seconds between two polls of the arrived ranks: at first, and at most.
SOON, LATER = 0.001, 0.1
PLACE = "not arrived at parallelize or pm.step"


def meet(board: FaultBoard, world: World, words: dist.Store) -> None:
    """Wait until every rank has a board; raise RuntimeFault if one does not arrive.

    `words` holds the messages of ranks that exited earlier.
    """
    site, deadline, pause = fault_site(world.rank, "start"), time.monotonic() + world.timeout, SOON
    # If the store does not answer, leave it to torch to report why.
    while (count := board.arrived()) is not None and count < world.mesh.size:
        if left := first_that_left(words):
            raise RuntimeFault(
                site, f"rank {left[0]} left ({left[1]}), {PLACE}", "look at that rank's own output"
            )
        if time.monotonic() > deadline:
            fact = f"waited {world.timeout:g} s for rank {', '.join(map(str, board.absent()))}, {PLACE}"
            raise RuntimeFault(site, fact, "look at their own output; all ranks make the same calls")
        time.sleep(pause)
        pause = min(2 * pause, LATER)


__all__ = ["meet"]
