"""Start values are rank 0's; what other ranks were given is not looked at, nor copied to their devices."""

from __future__ import annotations

from typing import Any

import torch

from autoptd.ir.mesh import Mesh
from autoptd.runtime.params.parts import from_rank_0
from autoptd.runtime.world.threads import ThreadWorld, run_ranks
from autoptd.runtime.world.world import Communicators, World


class Noting(torch.Tensor):
    """Knows which functions read it."""

    reads: list[str]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = super().__torch_function__(func, types, args, kwargs or {})
        name = getattr(func, "__name__", "")
        if name in ("to", "clone", "copy_", "contiguous", "detach"):
            args[0].reads.append(name)
            if isinstance(found, Noting):
                found.reads = args[0].reads
        return found


def test_only_rank_0_reads_its_values() -> None:
    def run(world: World) -> tuple[torch.Tensor, list[str]]:
        mine = torch.full((2, 3), float(world.rank)).t().as_subclass(Noting)  # type: ignore[arg-type]
        mine.reads = []
        return from_rank_0(world, "w", mine, torch.float64).as_subclass(torch.Tensor), mine.reads

    found = run_ranks(ThreadWorld(Mesh(t=2, p=2, d=2), Communicators(), timeout=20.0), run)
    for rank, (value, reads) in enumerate(found):
        assert value.dtype == torch.float64 and torch.equal(value, torch.zeros(3, 2, dtype=torch.float64))
        assert bool(reads) == (rank == 0), f"rank {rank} reads its own by {reads}"
