"""Write what a rank staged into its file of a checkpoint, in the format of torch.distributed.checkpoint.

In: `Staged`. Out: `__<rank>_0.distcp`; `__<rank>_0.crc`, a CRC32 for each MiB of it; and a `Report` of both for the rank that
commits, left in the folder. Nothing is communicated, so any thread may do it.

    write_rank(part, staged, {"optimizer.param_groups.0.lr": 3e-4})
    report = take_report(part, rank=3)               # by the rank that commits
"""

from __future__ import annotations

import pickle
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autoptd.runtime.checkpoint.manifest import crc_file
from autoptd.runtime.checkpoint.stage import Staged
from autoptd.runtime.folders.disk import remove_file, rename, write_file
from autoptd.runtime.params.fingerprint import fingerprint_of_rectangle
from autoptd.runtime.params.guard import unguarded


@dataclass
class Report:
    """What one rank has written: torch's plan and results, its state's other values, its files.

    `prints` has, by name, its parts of the fingerprint: see `runtime/params/fingerprint.py`.
    """

    rank: int
    plan: Any
    results: list[Any]
    values: dict[str, dict[str, Any]]
    prints: dict[str, int]
    files: dict[str, dict[str, int]] = field(default_factory=dict)


@unguarded()
def write_rank(folder: Path, staged: Staged, objects: Mapping[str, Any]) -> None:
    """Write a rank's file: its tensors, and `objects` by name, for other programs; then its report."""
    from autoptd.runtime.checkpoint.storage import write_items

    prints: dict[str, int] = {}
    for item in staged.tensors:
        if not item.key:
            own = fingerprint_of_rectangle(item.x, item.name, item.shape, item.offsets)
            prints[item.name] = prints.get(item.name, 0) + own
    plan, results, written = write_items(folder, staged, objects)
    report = Report(staged.rank, plan, results, staged.values, prints)
    for name, file in written.items():
        crcs = struct.pack(f"<{len(file.crcs)}I", *file.crcs)
        write_file(folder / crc_file(name), crcs)
        report.files[name] = {"bytes": file.nbytes}
        report.files[crc_file(name)] = {"bytes": len(crcs), "crc32": zlib.crc32(crcs)}
    # Complete, or not there yet.
    aside = folder / f"{report_file(staged.rank)}.new"
    write_file(aside, pickle.dumps(report))
    rename(aside, folder / report_file(staged.rank))


def report_file(rank: int) -> str:
    return f"report-{rank}"


def take_report(folder: Path, rank: int) -> Report:
    """Read the report of a rank of this run, and remove it."""
    report: Report = pickle.loads((folder / report_file(rank)).read_bytes())
    remove_file(folder / report_file(rank))
    return report


__all__ = ["Report", "report_file", "take_report", "write_rank"]
