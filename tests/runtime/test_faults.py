"""The board on which ranks in several processes tell each other why they stopped."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from autoptd.runtime import faults


def test_rank_0_stays_until_the_others_have_read_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may host the store: whoever has not read the first fault when it goes could not say which rank failed."""
    slept: list[float] = []
    monkeypatch.setattr(faults.time, "sleep", slept.append)
    first = json.dumps({"rank": 3, "at": "B1.1", "error": "rank 3 is gone"})
    for rank in (0, 1):
        store = dist.HashStore()
        world: Any = SimpleNamespace(rank=rank, at="F0.0", mesh=SimpleNamespace(size=4))
        board = faults.FaultBoard(store, world)
        for other in range(4):
            store.set(f"beat of {other}", json.dumps({"count": 0, "at": "", "waiting": ""}))
        store.set(faults.FIRST, first)
        slept.clear()
        assert "rank 3" in str(board.fault_of_call("receive 'RECV_B0.0<1'", RuntimeError("closed by peer")))
        board.close()
        assert slept == ([2 * faults.BEAT] if rank == 0 else [])
