"""Write and read checkpoint items in the format of torch.distributed.checkpoint, with its own classes.

In: tensors and their places in full tensors: those to write into a rank's file, or those to fill from the
files of all ranks. Out: a plan and the places in the file, for the rank that commits; filled tensors. Only
the disk layer is ours (`folders/disk.py`): files are synced, and have a CRC32 for each MiB.

    plan, results, files = write_items(part, staged, objects)
    write_metadata(part, [plan, ...], [results, ...], names)
    read_items(folder, read_metadata(data, site), reads_of(metadata, name, offsets, sizes, into), crcs_of)

torch's reader would read an item once per requested slice; here it is read once. `.metadata` is a pickle: its
unpickler is restricted to the classes of such metadata. Importing this file imports
torch.distributed.checkpoint, which takes half a second: it is imported by the functions that need it.
"""

from __future__ import annotations

import importlib
import io
import math
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from threading import Lock
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
from torch.serialization import get_crc32_options, set_crc32_options

from autoptd.compat import file_view
from autoptd.errors import PlanError, RuntimeFault
from autoptd.ir.rectangles import Sizes
from autoptd.runtime.checkpoint.manifest import METADATA, check_inside, fqn, path_of_group, path_of_item
from autoptd.runtime.checkpoint.stage import Staged, rows_of
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


class _Disk(FileSystem):
    """torch's file system, whose files are synced when they are closed, and keep the CRC32 of each block."""

    def __init__(self) -> None:
        self.written: dict[str, NewFile] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        with new_file(Path(path)) as file:
            self.written[Path(path).name] = file
            yield file


class _Planner(DefaultSavePlanner):
    """Hands the writer the values of a rank's items."""

    def __init__(self, values: Mapping[MetadataIndex, Any]) -> None:
        super().__init__()
        self._values = values

    def lookup_object(self, index: MetadataIndex) -> Any:
        value = self._values[index]
        if not isinstance(value, torch.Tensor) or not (
            value.is_cpu and value.is_contiguous() and value.numel()
        ):
            return value
        # Of rows of a larger tensor the writer would make a copy: this has memory that ends where they do.
        alone = torch.from_numpy(value.detach().reshape(-1).view(torch.uint8).numpy())
        return alone.view(value.dtype).view(value.shape)


class _Crc32sOff:
    """Keeps torch.save from computing CRC32s, which nothing reads, while any thread writes: files have those of blocks."""

    def __init__(self) -> None:
        self._lock, self._count, self._before = Lock(), 0, True

    def __enter__(self) -> None:
        with self._lock:
            if not self._count:
                self._before = get_crc32_options()
                set_crc32_options(False)
            self._count += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._count -= 1
            if not self._count:
                set_crc32_options(self._before)


_crc32s_off = _Crc32sOff()


def _writer(folder: Path) -> tuple[FileSystemWriter, _Disk]:
    # Our files are synced when they are closed.
    writer = FileSystemWriter(folder, sync_files=False)
    writer.fs = disk = _Disk()
    return writer, disk


@unguarded()
@torch.no_grad()
def write_items(
    folder: Path, staged: Staged, objects: Mapping[str, Any]
) -> tuple[SavePlan, list[WriteResult], dict[str, NewFile]]:
    """Write a rank's file, if it has items: its tensors, and objects by name; return what the rank that commits needs."""
    items: list[WriteItem] = []
    values: dict[MetadataIndex, Any] = {}
    paths: dict[str, tuple[Any, ...]] = {}
    for name, value in objects.items():
        items.append(WriteItem(index := MetadataIndex(name), WriteItemType.BYTE_IO))
        values[index], paths[name] = value, path_of_group(name)
    for item in staged.tensors:
        paths[item.fqn] = path_of_item(item.name, item.key)
        for offsets, x in rows_of(item.x, item.offsets, MOST_BYTES):
            chunk = ChunkStorageMetadata(torch.Size(offsets), x.shape)
            data = TensorWriteData(chunk, TensorProperties(dtype=x.dtype), torch.Size(item.shape))
            index = MetadataIndex(item.fqn, offsets)
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
            values[index] = x
    plan = SavePlan(items, planner_data=paths)
    if not items:
        return plan, [], {}
    writer, disk = _writer(folder)
    # The name of its file is by its place among the plans of all ranks.
    [*_, numbered] = writer.prepare_global_plan([plan] * (staged.rank + 1))
    with _crc32s_off:
        results = writer.write_data(numbered, _Planner(values)).wait()
    return plan, results, disk.written


def write_metadata(
    folder: Path,
    plans: Sequence[SavePlan],
    results: Sequence[list[WriteResult]],
    names: Mapping[str, str],
) -> Metadata:
    """Write `.metadata`, once torch has checked that the plans cover each tensor once.

    `names` maps other names of parameters to those under which they were written.
    """
    _, metadata = DefaultSavePlanner().create_global_plan(list(plans))
    known = {(result.index.fqn, result.index.offset): result for some in results for result in some}
    again = []
    for other, name in names.items():
        entry: Any = metadata.state_dict_metadata[fqn(name, "")]
        metadata.state_dict_metadata[fqn(other, "")] = entry
        metadata.planner_data[fqn(other, "")] = path_of_item(other, "")
        for chunk in entry.chunks:
            result = known[fqn(name, ""), chunk.offsets]
            index = MetadataIndex(fqn(other, ""), chunk.offsets)
            again.append(replace(result, index=index))
    _writer(folder)[0].finish(metadata, [*results, again])
    return metadata


class _Unpickler(pickle.Unpickler):
    """Unpickles the metadata of a checkpoint: any other class is a PlanError that names it."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in KNOWN.get(module, ()):
            return getattr(importlib.import_module(module), name)
        fact = f"would run {module}.{name}, which is not part of a checkpoint"
        raise PlanError(METADATA, fact, "do not use this folder, unless you know who wrote it")


def read_metadata(data: bytes, site: str) -> Metadata:
    """Read `.metadata`; PlanError where it is not what torch writes, leads out of the folder, or lacks parts of tensors."""
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
    """Return what to read to fill `into` by the rectangle of tensor `fqn` that begins at `offsets`."""
    wanted = ChunkStorageMetadata(torch.Size(offsets), into.shape)
    entry: Any = metadata.state_dict_metadata[fqn]
    return [(read, into) for read in create_read_items_for_chunk_list(fqn, entry, [wanted])]


def read_items(
    folder: Path,
    metadata: Metadata,
    reads: Iterable[tuple[ReadItem, torch.Tensor]],
    crcs_of: Callable[[str], Sequence[int] | None],
) -> int:
    """Read each item that is needed once, and copy its parts to where they go; return the bytes that were read.

    RuntimeFault where a block was changed, or a file cannot be read; PlanError for an item that would run code.
    """
    total = 0
    places = [(metadata.storage_data[read.storage_index], read, into) for read, into in reads]
    places.sort(key=lambda place: (place[0].relative_path, place[0].offset))
    for file, some in groupby(places, key=lambda place: place[0].relative_path):
        with _opened(folder / file, crcs_of(file)) as opened:
            for offset, same in groupby(some, key=lambda place: place[0].offset):
                parts = list(same)
                info, first, _ = parts[0]
                x = load_item(opened, offset, info.length, first.storage_index.fqn)
                for _, read, into in parts:
                    target = _narrow(into, read.dest_offsets, read.lengths)
                    target.copy_(_narrow(x, read.storage_offsets, read.lengths))
            total += opened.nbytes
    return total


@contextmanager
def _opened(path: Path, crcs: Sequence[int] | None) -> Iterator[CheckedFile]:
    try:
        file = CheckedFile(path, crcs)
    except OSError as error:
        raise RuntimeFault(str(path), f"cannot be read: {error}", REMEDY) from error
    with file:
        yield file


def load_item(file: CheckedFile, offset: int, nbytes: int, fqn: str) -> Any:
    """Read one item of a file, as torch.save wrote it."""
    try:
        return torch.load(file_view(file, offset, nbytes), map_location="cpu", weights_only=True)
    except Exception as error:
        if file.fault is not None:
            raise RuntimeFault(file.fault.site, f"{file.fault.fact}, read for {fqn}", REMEDY) from error
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        if isinstance(error, pickle.UnpicklingError):
            fact = f"has an item that is not read without unpickling code: {text}"
            raise PlanError(
                file.name, fact, "do not use this folder, unless you know who wrote it"
            ) from error
        raise RuntimeFault(file.name, f"cannot be read: {text}", REMEDY) from error


def _narrow(x: torch.Tensor, offsets: Sizes, sizes: Sizes) -> torch.Tensor:
    for dim, (start, size) in enumerate(zip(offsets, sizes, strict=True)):
        x = x.narrow(dim, start, size)
    return x


__all__ = [
    "Metadata",
    "MetadataIndex",
    "SavePlan",
    "WriteResult",
    "load_item",
    "read_items",
    "read_metadata",
    "reads_of",
    "write_items",
    "write_metadata",
]
