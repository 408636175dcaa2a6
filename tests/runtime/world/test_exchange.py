"""What threads would forgive and other transports do not: calls that start or come in another order."""

from __future__ import annotations

import threading

import pytest
import torch

from autoptd.errors import InternalError, RuntimeFault
from autoptd.ir.mesh import Mesh
from autoptd.runtime.world.threads import Ranks, ThreadWorld, run_ranks
from autoptd.runtime.world.world import Communicators, World


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter"])
def test_to_start_a_call_is_not_to_make_it(kind: str) -> None:
    shared = ThreadWorld(Mesh(t=2), Communicators(), timeout=5)

    def task(world: World) -> None:
        group, x = world.group(("tp",)), torch.ones(2)
        dim = () if kind == "all_reduce" else (0,)
        getattr(group, kind if world.rank else f"{kind}_start")(x, *dim, "h.0")

    with pytest.raises(RuntimeFault, match=f"calls {kind}.* where .* calls {kind}.* of the same group"):
        run_ranks(shared, task)


def test_calls_of_two_groups_need_one_order() -> None:
    """Each group has one, and threads get through, as nobody waits before all have started. NCCL would not."""
    shared = ThreadWorld(Mesh(t=2, d=2), Communicators(), timeout=5)
    started = threading.Barrier(4)

    def task(world: World) -> None:
        world.at = "B1.0"
        axes = ("tp", "dp") if world.rank in (0, 3) else ("dp", "tp")
        pending = [world.group((axis,)).all_reduce_start(torch.ones(2), axis) for axis in axes]
        started.wait()
        for one in pending:
            one.wait()

    ranks = Ranks(shared)
    with pytest.raises(InternalError, match=r"wait for each other: rank 0 at B1\.0 .*'tp' .* rank 1 at"):
        ranks.run(task)
    sums = ranks.run(lambda world: world.group(("tp",)).all_reduce(torch.ones(1), "again").item())
    assert sums == [2.0] * 4
    ranks.close()
