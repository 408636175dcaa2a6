"""Write what a rank staged into its file of a checkpoint, in the format of torch.distributed.checkpoint.

In: `Staged`. Out: `__<rank>_0.distcp`, items as `torch.save` writes them, end to end; `__<rank>_0.crc`, a CRC32 for each MiB
of it; and a `Report` that says where everything is. Nothing is communicated, so any thread may do it.

    report = write_rank(part, staged, {"optimizer.param_groups.0.lr": 3e-4})
    leave_report(part, report)                        # for the rank that commits

An item is a zip archive without compression, so that the bytes of a tensor are read from where they are, unpickled by nobody.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from autoptd.ir.rectangles import Sizes
from autoptd.runtime.checkpoint.archive import around_of, bytes_of
from autoptd.runtime.checkpoint.stage import Staged
from autoptd.runtime.folders.disk import NewFile, new_file, remove_file, rename, write_file
from autoptd.runtime.params.fingerprint import fingerprint_of_rectangle
from autoptd.runtime.params.guard import unguarded

# A multiple of the bytes of every element: items begin at such bytes of a file, and their elements too.
ALIGNMENT = 64


@dataclass
class Written:
    """One item of a file: from byte `start` on in `nbytes`; the elements begin at byte `at`, -1 for no tensor.

    `print` is the fingerprint of what it has of the model; 0 for an optimizer's state.
    """

    name: str
    key: str
    dtype: str
    shape: Sizes
    offsets: Sizes
    sizes: Sizes
    start: int
    nbytes: int
    at: int = -1
    print: int = 0


@dataclass
class Report:
    """What one rank has written; `error` says why it could not."""

    rank: int
    items: list[Written] = field(default_factory=list)
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    files: dict[str, dict[str, int]] = field(default_factory=dict)
    error: str = ""


def data_file(rank: int) -> str:
    return f"__{rank}_0.distcp"


def crc_file(file: str) -> str:
    """Return the name of the file with the CRCs of a data file."""
    return file.removesuffix(".distcp") + ".crc"


@unguarded()
@torch.no_grad()
def write_rank(folder: Path, staged: Staged, objects: Mapping[str, Any]) -> Report:
    """Write a rank's file: its tensors, and `objects` by name, for other programs."""
    report = Report(staged.rank, values=staged.values)
    if not staged.tensors and not objects:
        return report
    name = data_file(staged.rank)
    with new_file(folder / name) as file:
        for label, value in objects.items():
            start, nbytes = _save(value, file)
            report.items.append(Written(label, "", "", (), (), (), start, nbytes))
        for item in staged.tensors:
            x = compact(item.x)
            start, at, nbytes = _save_tensor(x, file)
            dtype = str(x.dtype).removeprefix("torch.")
            places = (item.shape, item.offsets, tuple(x.shape))
            own = 0 if item.key else fingerprint_of_rectangle(x, item.name, item.shape, item.offsets)
            report.items.append(Written(item.name, item.key, dtype, *places, start, nbytes, at, own))
    crcs = struct.pack(f"<{len(file.crcs)}I", *file.crcs)
    write_file(folder / crc_file(name), crcs)
    report.files = {
        name: {"bytes": file.nbytes},
        crc_file(name): {"bytes": len(crcs), "crc32": zlib.crc32(crcs)},
    }
    return report


def compact(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the host whose memory has its elements only: torch.save writes all of a tensor's memory."""
    x = x.detach().cpu()
    is_own = x.untyped_storage().nbytes() == x.nbytes
    return x if is_own and x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)


def _save_tensor(x: torch.Tensor, file: NewFile) -> tuple[int, int, int]:
    """Append a tensor; return where its item begins, where its elements do, and the bytes of the item."""
    if not x.nbytes:
        start, nbytes = _save(x, file)
        return start, start, nbytes
    head, tail = around_of(x)
    file.write(bytes(-file.tell() % ALIGNMENT))
    start = file.tell()
    file.write(head)
    at = file.tell()
    file.write(bytes_of(x))
    file.write(tail)
    return start, at, file.tell() - start


def _save(value: Any, file: NewFile) -> tuple[int, int]:
    """Append an item; return where it begins, and its bytes."""
    start = file.tell()
    torch.save(value, file)  # type: ignore[arg-type]  # it writes, and nothing else is asked of it
    return start, file.tell() - start


def report_file(rank: int) -> str:
    return f"report-{rank}.json"


def leave_report(folder: Path, report: Report) -> None:
    """Write a report into the folder: complete, or not there yet."""
    aside = folder / f"{report_file(report.rank)}.new"
    record = {**vars(report), "items": [vars(item) for item in report.items]}
    write_file(aside, json.dumps(record).encode())
    rename(aside, folder / report_file(report.rank))


def take_report(folder: Path, rank: int) -> Report:
    """Read the report of a rank, and remove it."""
    record = json.loads((folder / report_file(rank)).read_bytes())
    items = []
    for entry in record.pop("items"):
        for key in ("shape", "offsets", "sizes"):
            entry[key] = tuple(entry[key])
        items.append(Written(**entry))
    remove_file(folder / report_file(rank))
    return Report(items=items, **record)


__all__ = [
    "Report",
    "Written",
    "crc_file",
    "data_file",
    "leave_report",
    "report_file",
    "take_report",
    "write_rank",
]
