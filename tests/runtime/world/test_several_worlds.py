"""Several worlds of one process group: each has groups of its own, and the last one to be closed ends it."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from autoptd.errors import RuntimeFault
from autoptd.ir.mesh import Mesh
from autoptd.runtime.step.launch import ProcessRank
from autoptd.runtime.world.processes import DistributedWorld
from autoptd.runtime.world.world import Communicators
from tests.forks import CONTEXT
from tests.ports import free_port

pytestmark = pytest.mark.processes


def _make_and_close(rank: int, port: int, is_given: bool, out: Any) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    if is_given:
        dist.init_process_group("gloo")
    worlds = [DistributedWorld(Mesh(t=2), Communicators(), timeout=20.0, device="cpu") for _ in range(3)]
    said: list[Any] = []
    # The one that made the process group is not the last to use it.
    for world in (worlds[0], worlds[2], worlds[1]):
        for each in worlds:
            if not each.is_closed:
                said.append(each.everyone().all_reduce(torch.ones(1), "test").item())
        world.close()
        world.close()
        said.append(dist.is_initialized())
    again = DistributedWorld(Mesh(t=2), Communicators(), timeout=20.0, device="cpu")
    again.close()
    out.put([*said, dist.is_initialized()])


@pytest.mark.parametrize("is_given", [False, True])
def test_worlds_are_closed_in_any_order(is_given: bool) -> None:
    out, port = CONTEXT.Queue(), free_port()
    ranks = [CONTEXT.Process(target=_make_and_close, args=(rank, port, is_given, out)) for rank in range(2)]
    for each in ranks:
        each.start()
    said = [out.get(timeout=60) for _ in ranks]
    for each in ranks:
        each.join(60)
    assert said == [[2, 2, 2, True, 2, 2, True, 2, is_given, is_given]] * 2


def test_a_closed_world_takes_no_calls() -> None:
    rank = ProcessRank.__new__(ProcessRank)
    rank._world = SimpleNamespace(is_closed=True)  # type: ignore[assignment]
    with pytest.raises(RuntimeFault, match=r"pm.close\(\) has ended them"):
        rank.run("step", lambda rank: None)
