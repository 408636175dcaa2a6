"""Wait for all ranks before torch does: in Python, where Ctrl-C ends it, and a rank that has left ends it too.

In: this rank's board. Out: nothing, once every rank has one; or a RuntimeFault that names who does not come. Afterwards the
waits of torch as it makes groups, which nothing ends but their timeout, are short.

    meet(board, world, words)
"""

from __future__ import annotations

import time

import torch.distributed as dist

from autoptd.errors import RuntimeFault
from autoptd.runtime.world.faults import FaultBoard
from autoptd.runtime.world.leaving import first_that_left
from autoptd.runtime.world.world import World, fault_site

# Seconds between two looks at who has arrived: at first, and at most.
SOON, LATER = 0.001, 0.1
PLACE = "not arrived at parallelize or pm.step"


def meet(board: FaultBoard, world: World, words: dist.Store) -> None:
    """Wait until every rank has a board; RuntimeFault where one does not come. `words` has those of ranks that left before."""
    site, deadline, pause = fault_site(world.rank, "start"), time.monotonic() + world.timeout, SOON
    # Without an answer of the store torch says what is wrong with it.
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
