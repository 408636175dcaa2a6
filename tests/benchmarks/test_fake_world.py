"""A group of which only this rank exists: what it gathers is its own, at once or waited for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from autoptd.ir.mesh import Mesh
from autoptd.runtime.world.processes import DistributedGroup, DistributedWorld
from autoptd.runtime.world.world import Communicators
from benchmarks.lib.fake_world import fake_process_group


@pytest.fixture
def group() -> Iterator[DistributedGroup]:
    fake_process_group(rank=1, world_size=4)
    world = DistributedWorld(Mesh(t=4), Communicators(), device="cpu", timeout=30.0)
    yield DistributedGroup(world, dist.group.WORLD, tuple(range(4)))  # type: ignore[arg-type]
    dist.destroy_process_group()


def test_what_is_gathered_is_its_own(group: DistributedGroup) -> None:
    x = torch.arange(6.0).view(2, 3)
    wanted = torch.cat([x] * 4, 1)
    assert torch.equal(group.all_gather(x, 1, "here"), wanted)
    pending = group.all_gather_start(x, 1, "here")
    assert pending.is_done() and torch.equal(pending.wait(), wanted)
