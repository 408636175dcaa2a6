"""Run by `test_processes.py` as one rank: `autoptd doctor`, of which rank 1 sends wrong numbers over each channel, and is told
wrong parts by its groups."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

import torch

from autoptd.cli import main
from autoptd.runtime.distributed import DistributedChannel, DistributedGroup


def spoil() -> None:
    send, reduce = DistributedChannel.send, DistributedGroup.all_reduce

    def wrong_send(self: Any, tensors: Sequence[torch.Tensor], site: str) -> Any:
        return send(self, [x + 1 if x.dtype is torch.float32 else x for x in tensors], site)

    def wrong_reduce(self: Any, x: torch.Tensor, site: str, op: str = "sum") -> torch.Tensor:
        return reduce(self, x * 2 if x.dtype is torch.bfloat16 else x, site, op)

    DistributedChannel.send, DistributedGroup.all_reduce = wrong_send, wrong_reduce  # type: ignore[method-assign]


if __name__ == "__main__":
    if os.environ["RANK"] == "1":
        spoil()
    sys.exit(main(["doctor", *sys.argv[1:]]))
