"""Checkpoints that other programs wrote by torch.distributed.checkpoint: FSDP2, torchtitan, a plain training script.

In: a folder with `.metadata` and no manifest of AutoPTD's. Out: a `Checkpoint` with the same face, whose tensors are read by
torch.load(weights_only=True). `.metadata` is a pickle: an unpickler reads it that knows the classes of such metadata, and
nothing else.

    checkpoint = open_foreign(Path("fsdp2/step-1000"))
    checkpoint.manifest.state["lm_head.weight"]                  # ["step", "exp_avg", "exp_avg_sq"]

Known are the state dicts of `get_state_dict`, under "model" and "optimizer" (or "optim"), nested or flattened. Files have no
CRC32 that is known here: a changed byte is not noticed.
"""

from __future__ import annotations

import importlib
import os
import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from autoptd.errors import PlanError, RuntimeFault
from autoptd.runtime.checkpoint.commit import OLD, PART, beside, marked
from autoptd.runtime.checkpoint.manifest import (
    MANIFEST,
    METADATA,
    MODEL,
    Chunk,
    Manifest,
    TensorRecord,
    check_inside,
    fqn,
)
from autoptd.runtime.checkpoint.read import REMEDY, Checkpoint, Reader, Want, common, open_checkpoint
from autoptd.runtime.checkpoint.values import encode
from autoptd.runtime.checkpoint.window import window

RECORDS = "torch.distributed.checkpoint.metadata"
KNOWN = {
    (RECORDS, "Metadata"),
    (RECORDS, "TensorStorageMetadata"),
    (RECORDS, "BytesStorageMetadata"),
    (RECORDS, "ChunkStorageMetadata"),
    (RECORDS, "TensorProperties"),
    (RECORDS, "MetadataIndex"),
    (RECORDS, "StorageMeta"),
    (RECORDS, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
}
OPTIMIZERS = ("optimizer", "optim")


class MetadataUnpickler(pickle.Unpickler):
    """Unpickles the metadata of a checkpoint: any other class is a PlanError that names it."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in KNOWN:
            return getattr(importlib.import_module(module), name)
        fact = f"would run {module}.{name}, which is no part of a checkpoint"
        raise PlanError(METADATA, fact, "do not use this folder, unless you know who wrote it")


@dataclass(frozen=True)
class ForeignCheckpoint(Checkpoint):
    """A folder of another program: `sizes` has the bytes of the item that begins at a byte of a file."""

    sizes: Mapping[tuple[str, int], int]

    def reader(self) -> ForeignReader:
        return ForeignReader(self)

    def fingerprint(self) -> str:
        """Return a hash that differs where the manifests differ, and most often where the files do."""
        sizes = sorted(f"{path.name} {path.stat().st_size}" for path in self.path.iterdir())
        return f"{super().fingerprint()} {'; '.join(sizes)}"


class ForeignReader(Reader):
    """Reads whole items, as torch.save wrote them."""

    def __init__(self, checkpoint: ForeignCheckpoint) -> None:
        super().__init__(checkpoint)
        self._foreign = checkpoint

    def fill(self, wants: Iterable[Want]) -> None:
        by_chunk: dict[tuple[str, int], list[tuple[Chunk, Want]]] = {}
        for want in wants:
            for chunk in self._tensors[want.fqn].chunks:
                if common(chunk, want) is not None:
                    by_chunk.setdefault((chunk.file, chunk.at), []).append((chunk, want))
        # Each item is read once, whatever is needed of it.
        for place, some in sorted(by_chunk.items(), key=lambda entry: entry[0]):
            x = read_item(self._foreign, place)
            self.nbytes += self._foreign.sizes[place]
            for chunk, want in some:
                if not isinstance(x, torch.Tensor) or tuple(x.shape) != chunk.sizes:
                    raise RuntimeFault(want.fqn, "is not what its metadata says", REMEDY)
                copy_common(x, chunk, want)


@torch.no_grad()
def copy_common(x: torch.Tensor, chunk: Chunk, want: Want) -> None:
    """Copy the elements of a chunk that are wanted."""
    begin, sizes = common(chunk, want) or ((), ())
    into = want.into
    for dim, size in enumerate(sizes):
        into = into.narrow(dim, begin[dim] - want.offsets[dim], size)
        x = x.narrow(dim, begin[dim] - chunk.offsets[dim], size)
    into.copy_(x)


def read_item(checkpoint: ForeignCheckpoint, place: tuple[str, int]) -> Any:
    """Read one item of a file; PlanError for one that holds more than tensors and plain values."""
    file, start = place
    path = checkpoint.path / file
    try:
        with path.open("rb") as opened:
            item = window(opened.fileno(), start, checkpoint.sizes[place])
            return torch.load(item, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        fact = f"has an item that is not read without unpickling code: {str(error).splitlines()[0]}"
        raise PlanError(str(path), fact, "do not use this folder, unless you know who wrote it") from error
    except (RuntimeError, OSError, EOFError, ValueError) as error:
        raise RuntimeFault(str(path), f"cannot be read: {str(error).splitlines()[0]}", REMEDY) from error


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Tell whether there is a checkpoint at a path, or one beside it that a save was replacing."""
    folder = Path(path)
    if (folder / MANIFEST).is_file() or (folder / METADATA).is_file():
        return True
    return not folder.exists() and bool(beside(folder, OLD))


def open_any(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a checkpoint of AutoPTD's, or one that another program wrote; PlanError where there is neither."""
    folder = Path(path)
    if (folder / METADATA).is_file() and not (folder / MANIFEST).is_file() and not marked(folder, PART):
        return open_foreign(folder)
    return open_checkpoint(folder)


def open_foreign(folder: Path) -> ForeignCheckpoint:
    """Read the metadata of a folder that another program wrote; PlanError where it is not readable, or not whole."""
    metadata = read_metadata(folder)
    manifest = Manifest({"optimizer": None})
    sizes: dict[tuple[str, int], int] = {}
    records: dict[str, TensorRecord] = {}
    objects: dict[str, tuple[str, int]] = {}
    for name, entry in metadata.state_dict_metadata.items():
        if hasattr(entry, "chunks"):
            records[name] = TensorRecord(
                tuple(entry.size), str(entry.properties.dtype).removeprefix("torch.")
            )
    for index, info in metadata.storage_data.items():
        check_inside(info.relative_path, str(folder / METADATA))
        place = (info.relative_path, info.offset)
        sizes[place] = info.length
        if index.fqn not in records:
            objects[index.fqn] = place
            continue
        shape = chunk_sizes(metadata.state_dict_metadata[index.fqn], index.offset)
        records[index.fqn].chunks.append(Chunk(tuple(index.offset), shape, *place))
    check_sizes(folder, sizes)
    checkpoint = ForeignCheckpoint(folder, manifest, {}, sizes)
    paths = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
    groups: dict[Any, dict[str, Any]] = {}
    for name in [*records, *objects]:
        where = place_of(tuple(paths.get(name, (name,))))
        if name in records and where[0] == "model":
            manifest.tensors[MODEL + where[1]] = records[name]
        elif name in records and where[0] == "state":
            manifest.tensors[fqn(where[1], where[2])] = records[name]
            manifest.state.setdefault(where[1], []).append(where[2])
        elif name in objects and where[0] == "state":
            value = encode(read_item(checkpoint, objects[name]), name)
            manifest.values.setdefault(where[1], {})[where[2]] = value
        elif name in objects and where[0] == "group":
            groups.setdefault(where[1], {})[where[2]] = encode(read_item(checkpoint, objects[name]), name)
    manifest.about["optimizer"] = optimizer_of(groups)
    names = {name.removeprefix(MODEL): name for name in manifest.tensors if name.startswith(MODEL)}
    return ForeignCheckpoint(folder, manifest, names, sizes)


def read_metadata(folder: Path) -> Any:
    try:
        with (folder / METADATA).open("rb") as file:
            return MetadataUnpickler(file).load()
    except PlanError:
        raise
    except Exception as error:
        fact = f"cannot be read: {type(error).__name__}: {error}"
        raise PlanError(str(folder / METADATA), fact, "another checkpoint: this one is damaged") from error


def chunk_sizes(entry: Any, offset: Any) -> tuple[int, ...]:
    """Return the sizes of the chunk of a tensor that begins at `offset`."""
    return next(tuple(chunk.sizes) for chunk in entry.chunks if tuple(chunk.offsets) == tuple(offset))


def check_sizes(folder: Path, sizes: Mapping[tuple[str, int], int]) -> None:
    """Raise PlanError that lists the files which are missing, or end before an item does."""
    ends: dict[str, int] = {}
    for (file, start), nbytes in sizes.items():
        ends[file] = max(ends.get(file, 0), start + nbytes)
    findings = []
    for file, end in sorted(ends.items()):
        if not (folder / file).is_file():
            findings.append(f"{file} is missing")
        elif (size := os.path.getsize(folder / file)) < end:
            findings.append(f"{file} has {size} bytes, not {end}")
    if findings:
        raise PlanError(str(folder), "; ".join(findings), "another checkpoint, or all files of this one")


def place_of(path: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return what an entry is, by its path in nested state dicts: ("model", name), ("state", name, key), ("group", i, key)."""
    *before, last = path
    if len(before) >= 3 and before[-3] in OPTIMIZERS and before[-2] == "state":
        return "state", before[-1], last
    if len(before) >= 3 and before[-3] in OPTIMIZERS and before[-2] == "param_groups":
        return "group", before[-1], last
    if not before or before[-1] in OPTIMIZERS:
        # Flattened: `state.lm_head.weight.exp_avg`, `param_groups.lm_head.weight.lr`.
        kind, _, rest = str(last).partition(".")
        name, _, key = rest.rpartition(".")
        if kind in ("state", "param_groups") and name:
            return ("state" if kind == "state" else "group"), name, key
    if not before or before[-1] == "model":
        return "model", str(last)
    return "", ".".join(map(str, path))


def optimizer_of(groups: Mapping[Any, dict[str, Any]]) -> dict[str, Any] | None:
    """Return what the groups of a checkpoint were, of its numbered groups, or of settings by parameter."""
    if not groups:
        return None
    numbered = sorted(key for key in groups if isinstance(key, int))
    if numbered:
        found = [groups[key] for key in numbered]
    else:
        found = []
        for name, settings in groups.items():
            alike = next((g for g in found if {**g, "params": 0} == {**settings, "params": 0}), None)
            if alike is None:
                alike = {**settings, "params": []}
                found.append(alike)
            alike["params"].append(name)
    return {"class": None, "groups": found}


__all__ = ["ForeignCheckpoint", "is_checkpoint", "open_any", "open_foreign"]
