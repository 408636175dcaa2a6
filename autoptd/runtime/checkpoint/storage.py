"""Write and read the files of a checkpoint in the format of torch.distributed.checkpoint, with its plans and
its metadata.

In: tensors and their places in full tensors: those that a rank writes, or those to fill from the files of all
ranks. Out: a plan, and the places in the rank's file, for the rank that commits; filled tensors. Files are
synced, with a CRC32 for each MiB (`folders/disk.py`).

    plan, results, file = write_items(part, staged, objects)
    write_metadata(part, [plan, ...], [results, ...], names)
    read_items(folder, read_metadata(data, site), reads_of(metadata, name, offsets, into), crcs_of)

torch's own reader reads an item once per requested slice; `read_items` reads it once. `.metadata` is a
pickle: its unpickler accepts the classes of such metadata only. Import this module where it is needed: it
imports torch.distributed.checkpoint, which takes half a second.
"""

from __future__ import annotations

import importlib
import io
import math
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from autoptd.compat import file_view, save_item, storage_info
from autoptd.errors import PlanError, RuntimeFault
from autoptd.ir.buffers import bytes_of
from autoptd.ir.rectangles import Sizes
from autoptd.runtime.checkpoint.manifest import (
    METADATA,
    Staged,
    check_inside,
    fqn,
    path_of_group,
    path_of_item,
    rows_of,
)
from autoptd.runtime.folders.disk import REMEDY, CheckedFile, NewFile, new_file
from autoptd.runtime.params.guard import unguarded

# Items are always read whole, so large tensors are written in items of at most this size.
MOST_BYTES = 4 << 20
# The classes of torch's metadata.
KNOWN = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "MetadataIndex",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},
}
OTHERS_REMEDY = "do not use this folder, unless you know who wrote it"


@unguarded()
@torch.no_grad()
def write_items(
    folder: Path, staged: Staged, objects: Mapping[str, Any]
) -> tuple[SavePlan, list[WriteResult], tuple[str, NewFile] | None]:
    """Write a rank's file, if it has items: its tensors, and objects by name."""
    items: list[tuple[WriteItem, Any]] = []
    paths: dict[str, tuple[Any, ...]] = {}
    for name, value in objects.items():
        items.append((WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO), value))
        paths[name] = path_of_group(name)
    for item in staged.tensors:
        paths[item.fqn] = path_of_item(item.name, item.key)
        for offsets, x in rows_of(item.x, item.offsets, MOST_BYTES):
            chunk = ChunkStorageMetadata(torch.Size(offsets), x.shape)
            data = TensorWriteData(chunk, TensorProperties(dtype=x.dtype), torch.Size(item.shape))
            index = MetadataIndex(item.fqn, offsets)
            items.append((WriteItem(index, WriteItemType.SHARD, tensor_data=data), x))
    plan = SavePlan([item for item, _ in items], planner_data=paths)
    if not items:
        return plan, [], None
    results, name = [], f"__{staged.rank}_0.distcp"
    with new_file(folder / name) as file:
        for write, value in items:
            start = file.nbytes
            save_item(alone(value) if isinstance(value, torch.Tensor) else value, file)
            place = storage_info(name, start, file.nbytes - start)
            results.append(WriteResult(write.index, file.nbytes - start, place))
    return plan, results, (name, file)


def alone(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the CPU whose storage has nothing else: an item is the whole storage of its tensor."""
    x = x.cpu()
    if not (x.is_contiguous() and x.numel()):
        return x.clone()
    return torch.from_numpy(bytes_of(x).numpy()).view(x.dtype).view(x.shape)


class _Disk(FileSystem):
    """torch's file system, whose files are synced when they are closed."""

    create_stream = staticmethod(lambda path, mode: new_file(Path(path)))  # type: ignore[assignment]


def write_metadata(
    folder: Path,
    plans: Sequence[SavePlan],
    results: Sequence[list[WriteResult]],
    names: Mapping[str, str],
) -> Metadata:
    """Write `.metadata`, after torch has checked that the plans cover each tensor once.

    `names` maps other names of parameters to the names under which they were written.
    """
    _, metadata = DefaultSavePlanner().create_global_plan(list(plans))
    known = {(result.index.fqn, result.index.offset): result for some in results for result in some}
    others = []
    for other, name in names.items():
        entry: Any = metadata.state_dict_metadata[fqn(name, "")]
        metadata.state_dict_metadata[fqn(other, "")] = entry
        metadata.planner_data[fqn(other, "")] = path_of_item(other, "")
        for chunk in entry.chunks:
            result = known[fqn(name, ""), chunk.offsets]
            others.append(replace(result, index=MetadataIndex(fqn(other, ""), chunk.offsets)))
    writer = FileSystemWriter(folder, sync_files=False)
    writer.fs = _Disk()
    writer.finish(metadata, [*results, others])
    return metadata


class _Unpickler(pickle.Unpickler):
    """Unpickles the metadata of a checkpoint; raises PlanError for any other class."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in KNOWN.get(module, ()):
            return getattr(importlib.import_module(module), name)
        fact = f"would run {module}.{name}, which is not part of a checkpoint"
        raise PlanError(METADATA, fact, OTHERS_REMEDY)


def read_metadata(data: bytes, site: str) -> Metadata:
    """Read `.metadata`; PlanError if torch did not write it, if it leads out of the folder, or if parts of
    tensors are missing.
    """
    damaged = "another checkpoint: this one is damaged"
    try:
        metadata: Metadata = _Unpickler(io.BytesIO(data)).load()
        for info in metadata.storage_data.values():
            check_inside(info.relative_path, site)
        for name, entry in metadata.state_dict_metadata.items():
            filled = [chunk for chunk in getattr(entry, "chunks", ()) if math.prod(chunk.sizes)]
            known = [chunk for chunk in filled if MetadataIndex(name, chunk.offsets) in metadata.storage_data]
            count, size = sum(math.prod(chunk.sizes) for chunk in known), getattr(entry, "size", None)
            if size is not None and count < math.prod(size):
                raise PlanError(site, f"has {count} of the {math.prod(size)} elements of {name}", damaged)
    except PlanError:
        raise
    except Exception as error:
        raise PlanError(site, f"cannot be read: {type(error).__name__}: {error}", damaged) from error
    return metadata


def reads_of(
    metadata: Metadata, fqn: str, offsets: Sizes, into: torch.Tensor
) -> list[tuple[ReadItem, torch.Tensor]]:
    """Return the reads that fill `into` with the rectangle of tensor `fqn` that begins at `offsets`."""
    wanted = ChunkStorageMetadata(torch.Size(offsets), into.shape)
    entry: Any = metadata.state_dict_metadata[fqn]
    return [(read, into) for read in create_read_items_for_chunk_list(fqn, entry, [wanted])]


def read_items(
    folder: Path,
    metadata: Metadata,
    reads: Iterable[tuple[ReadItem, torch.Tensor]],
    crcs_of: Callable[[str], Sequence[int] | None],
) -> int:
    """Read each item once, and copy its parts to their tensors; return the number of bytes read.

    RuntimeFault if a block was changed, or a file cannot be read; PlanError for an item that would run code.
    """
    total = 0
    places = [(metadata.storage_data[read.storage_index], read, into) for read, into in reads]
    places.sort(key=lambda place: (place[0].relative_path, place[0].offset))
    for file, some in groupby(places, key=lambda place: place[0].relative_path):
        with open_data(folder / file, crcs_of(file)) as opened:
            for offset, same in groupby(some, key=lambda place: place[0].offset):
                parts = list(same)
                info, first, _ = parts[0]
                x = load_item(opened, offset, info.length, first.storage_index.fqn)
                for _, read, into in parts:
                    target = _narrow(into, read.dest_offsets, read.lengths)
                    target.copy_(_narrow(x, read.storage_offsets, read.lengths))
            total += opened.nbytes
    return total


def open_data(path: Path, crcs: Sequence[int] | None) -> CheckedFile:
    try:
        return CheckedFile(path, crcs)
    except OSError as error:
        raise RuntimeFault(str(path), f"cannot be read: {error}", REMEDY) from error


def load_item(file: CheckedFile, offset: int, nbytes: int, fqn: str) -> Any:
    """Read one item of a file, as torch.save wrote it."""
    try:
        return torch.load(file_view(file, offset, nbytes), map_location="cpu", weights_only=True)
    except Exception as error:
        if file.fault is not None:
            raise RuntimeFault(file.fault.site, f"{file.fault.fact}, read for {fqn}", REMEDY) from error
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        if isinstance(error, pickle.UnpicklingError):
            fact = f"has an item that cannot be read without unpickling code: {text}"
            raise PlanError(file.name, fact, OTHERS_REMEDY) from error
        raise RuntimeFault(file.name, f"cannot be read: {text}", REMEDY) from error


def _narrow(x: torch.Tensor, offsets: Sizes, sizes: Sizes) -> torch.Tensor:
    for dim, (start, size) in enumerate(zip(offsets, sizes, strict=True)):
        x = x.narrow(dim, start, size)
    return x
