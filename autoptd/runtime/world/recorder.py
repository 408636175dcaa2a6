"""Record the last calls of every rank in torch's flight recorder, write them after a fault, and name its
groups.

In: the name of the run, the same on all ranks; a fault. Out: `out/faults/<run>/rank_<rank>` for each rank
that is still alive, including the failing one. `torchfrtrace` reads them: it reports which rank missed which
call on which communicator.

    set_defaults()                                   # before the first process group
    recorder = Recorder(rank, run)
    recorder.dump()                                  # from any thread
    group_desc = describe(mesh, communicators, ranks)            # "tp of ranks 0-7"
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist

from autoptd.ir.mesh import MESH_AXES, Mesh
from autoptd.runtime.world.world import Communicators

FOLDER, PREFIX = Path("out/faults"), "rank_"


def set_defaults() -> None:
    """Let NCCL record its last 2000 calls, and write them if its watchdog ends a process; what the user set stays."""
    # The older name is read where the newer one is not set.
    if "TORCH_NCCL_TRACE_BUFFER_SIZE" not in os.environ:
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")


class Recorder:
    """Writes what this rank's flight recorder has, once."""

    def __init__(self, rank: int, run: str, folder: Path = FOLDER) -> None:
        self._rank, self._folder = rank, folder / run[:8]
        self._is_over = self._has_written = False
        # The groups of the world, added to the dump if the recorder does not have them.
        self.groups: list[dist.ProcessGroup] = []

    def dump(self) -> None:
        """Write the record, if there is one and a place for it."""
        if self._is_over:
            return
        self._is_over = True
        try:
            if (record := flight_record(self.groups)) is None:
                return
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / f"{PREFIX}{self._rank}").write_bytes(record)
        except Exception:
            # A full disk or another torch's format must not hide the fault itself.
            return
        self._has_written = True

    @property
    def hint(self) -> str:
        """Return how to read the dump; "" if none was written."""
        if not self._has_written:
            return ""
        return (
            f"; the last calls of each rank: torchfrtrace --allow-incomplete-ranks -p {PREFIX} {self._folder}"
        )


def flight_record(groups: Sequence[dist.ProcessGroup]) -> bytes | None:
    """Return what torch's flight recorder has of this process, as `torchfrtrace` reads it; None if nothing."""
    c10d = torch._C._distributed_c10d
    # Of NCCL where that ran, else of gloo: a torch that is built with NCCL has both.
    dumps = [getattr(c10d, name, None) for name in ("_dump_nccl_trace", "_dump_fr_trace")]
    records = (pickle.loads(dump(includeStackTraces=False)) for dump in dumps if dump is not None)
    record = next((each for each in records if each.get("entries")), None)
    if record is None:
        return None
    # That of gloo does not say who is in a group, without which nothing is matched.
    known = record["pg_config"]
    for group in groups:
        if group.group_name not in known:
            ranks = str(dist.get_process_group_ranks(group))
            known[group.group_name] = {"name": group.group_name, "desc": group.group_desc, "ranks": ranks}
    record["entries"] = [entry for entry in record["entries"] if entry["process_group"][0] in known]
    return pickle.dumps(record)


def describe(mesh: Mesh, communicators: Communicators, ranks: tuple[int, ...]) -> str:
    """Name a group by what it runs along, and its ranks: "dp of ranks 0, 4"; "tied" where they hold copies of a parameter."""
    single = ((axis,) for axis in (*MESH_AXES, *communicators.sub_axes))
    for axes in (*single, mesh.value_axes, mesh.gradient_axes, *communicators.joint):
        if ranks in mesh.groups(axes):
            return f"{'+'.join(axes)} of ranks {ranges_text(ranks)}"
    return f"tied over ranks {ranges_text(ranks)}"


def ranges_text(ranks: Sequence[int]) -> str:
    """Return "0-3, 8" of (0, 1, 2, 3, 8); of ranks at equal distances "0, 4, ..., 28"."""
    steps = {later - earlier for earlier, later in pairwise(ranks)}
    if len(ranks) > 3 and len(steps) == 1 and steps != {1}:
        return f"{ranks[0]}, {ranks[1]}, ..., {ranks[-1]}"
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
