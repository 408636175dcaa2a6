"""Run a function on some processes of this machine that talk over gloo, one thread each.

rows = spawn(measure, 2, config)          # what measure(config) returned on rank 0; importable, as multiprocessing wants it
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.ports import free_port


def spawn(fn: Callable[..., Any], size: int, *args: Any) -> Any:
    """Call `fn(*args)` on `size` processes of one default process group; return rank 0's result, which JSON can hold."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        mp.spawn(_rank, (size, free_port(), str(out), fn, args), nprocs=size)  # type: ignore[no-untyped-call]
        return json.loads(out.read_text())


def _rank(rank: int, size: int, port: int, out: str, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    result = fn(*args)
    if rank == 0:
        Path(out).write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()
