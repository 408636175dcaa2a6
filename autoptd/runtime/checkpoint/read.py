"""Open a checkpoint, of AutoPTD or of another program, and read parts of its tensors.

In: a folder, and rectangles of its tensors with the tensors to fill. Out: filled tensors. Each item of a file
is read once, and each block is checked.

    checkpoint = open_any("ckpts/step-00001000")
    checkpoint.reader().fill([Want("model.lm_head.weight", (32, 0), x)])        # rows 32 to 48
    autoptd.parallelize(model, t=8, weights=checkpoint.path)                    # a checkpoint is a `Source`, too

Other programs are those that save with torch.distributed.checkpoint: FSDP2, torchtitan, a plain training
script. The state dicts of `get_state_dict` are recognized under "model" and "optimizer" (or "optim"), nested
or flattened. Their files have no CRC32s: a changed byte is not noticed.
"""

from __future__ import annotations

import os
import reprlib
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from autoptd.errors import PlanError
from autoptd.ir.rectangles import Sizes
from autoptd.program.sources import Weights
from autoptd.runtime.checkpoint.commit import OLD, PART, find, marked, siblings
from autoptd.runtime.checkpoint.manifest import (
    MANIFEST,
    METADATA,
    MODEL,
    Manifest,
    add_tensors,
    check_files,
    crc_file,
    encode,
    fqn,
    opened_manifest,
    read_checked,
)
from autoptd.runtime.folders.disk import BLOCK_BYTES
from autoptd.runtime.folders.read_folder import open_folder
from autoptd.runtime.params.parts import dtype_of


class Want(NamedTuple):
    """The rectangle of tensor `fqn` of a checkpoint that begins at `offsets`, and the tensor to fill with it."""

    fqn: str
    offsets: Sizes
    into: torch.Tensor


@dataclass(frozen=True)
class Entry:
    """The properties of a tensor that are available without reading it."""

    shape: Sizes
    dtype: torch.dtype | None


@dataclass(frozen=True)
class Checkpoint:
    """An open checkpoint, which is a `Source` of parameters. `metadata` is torch's; `names` maps parameters
    to tensors.
    """

    path: Path
    manifest: Manifest
    names: Mapping[str, str]
    metadata: Any

    @property
    def entries(self) -> dict[str, Entry]:
        """The parameters and buffers, by all their names."""
        found = {}
        for name, tensor in self.names.items():
            record = self.manifest.tensors[tensor]
            found[name] = Entry(record.shape, getattr(torch, record.dtype, None))
        return found

    def reader(self) -> Reader:
        return Reader(self)

    def renamed(self, names: Mapping[str, str]) -> Checkpoint:
        """Return the same parameters and buffers under other names, given as old name -> new name."""
        return replace(self, names={names.get(name, name): fqn for name, fqn in self.names.items()})

    def only(self, names: Iterable[str]) -> Checkpoint:
        """Return the parameters and buffers with these names."""
        return replace(self, names={name: self.names[name] for name in names if name in self.names})

    def named(self, tied: Iterable[Sequence[str]]) -> Checkpoint:
        """Return tied parameters under the first of a model's names: another program may have chosen another
        one.
        """
        tensors, names = dict(self.manifest.tensors), dict(self.names)
        renamed: dict[str, str] = {}
        for first, *others in tied:
            known = next((name for name in (first, *others) if name in names), None)
            if known is not None:
                tensors[MODEL + first] = tensors[names[known]]
                # Not read under the other names.
                names |= dict.fromkeys((first, *others), MODEL + first)
            renamed |= dict.fromkeys(others, first)
        state, values = dict(self.manifest.state), dict(self.manifest.values)
        for name in renamed.keys() & state.keys():
            state[renamed[name]] = keys = state.pop(name)
            for key in keys:
                tensors[fqn(renamed[name], key)] = tensors[fqn(name, key)]
        for name in renamed.keys() & values.keys():
            values[renamed[name]] = values.pop(name)
        about = dict(self.manifest.about)
        if (record := about.get("optimizer")) is not None:
            about["optimizer"] = {**record, "groups": renamed_groups(record["groups"], renamed)}
        manifest = replace(self.manifest, about=about, tensors=tensors, state=state, values=values)
        return replace(self, manifest=manifest, names=names)

    def fingerprint(self) -> str:
        """Return a hash of the names and sizes of files, and of the files that describe the others."""
        crc = 0
        for path in sorted(self.path.iterdir()):
            crc = zlib.crc32(f"{path.name} {path.stat().st_size}".encode(), crc)
            crc = zlib.crc32(path.read_bytes() if path.name in (MANIFEST, METADATA) else b"", crc)
        return f"{crc:08x}"

    def parts(self) -> dict[str, str]:
        return {MANIFEST: self.fingerprint()}

    def difference(self, names: list[str]) -> tuple[str, str]:
        return (
            f"found another checkpoint in {str(self.path)!r} than rank 0",
            "give every node the same folder",
        )

    def crcs_of(self, file: str) -> memoryview | None:
        """Return the CRC32 of each block of a file; None if none were written."""
        if crc_file(file) not in self.manifest.files:
            return None
        return memoryview(read_checked(self.path, self.manifest, crc_file(file))).cast("I")


def renamed_groups(groups: Iterable[Mapping[str, Any]], names: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the groups of an optimizer with some parameters renamed, each parameter once."""
    found = []
    for group in groups:
        params = dict.fromkeys(names.get(name, name) for name in group["params"])
        found.append({**group, "params": list(params)})
    return found


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Tell whether there is a checkpoint at a path, or one next to it that was being replaced."""
    folder = Path(path)
    if (folder / MANIFEST).is_file() or (folder / METADATA).is_file():
        return True
    return not folder.exists() and bool(siblings(folder, OLD))


def open_weights(path: str | os.PathLike[str]) -> Weights:
    """Open `weights=`: a folder of Hugging Face's format, or a checkpoint; PlanError for anything else."""
    if not isinstance(path, (str, os.PathLike)):
        remedy = "a folder with a model's files, or a checkpoint"
        raise PlanError(f"weights={reprlib.repr(path)}", "is not the path of a folder", remedy)
    return open_any(path) if is_checkpoint(path) else open_folder(path)


def open_any(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a checkpoint of AutoPTD, or of another program; PlanError if there is neither."""
    folder = Path(path)
    if (folder / METADATA).is_file() and not (folder / MANIFEST).is_file() and not marked(folder, PART):
        return open_foreign(folder)
    return open_checkpoint(folder)


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a checkpoint of AutoPTD; PlanError if files are missing or damaged. Tensors are not read yet."""
    from autoptd.runtime.checkpoint.storage import read_metadata

    folder = find(Path(path))
    manifest = opened_manifest(folder)
    metadata = read_metadata(read_checked(folder, manifest, METADATA), str(folder / METADATA))
    add_tensors(manifest, metadata)
    return _checkpoint(folder, manifest, metadata)


def _checkpoint(folder: Path, manifest: Manifest, metadata: Any) -> Checkpoint:
    names = {fqn.removeprefix(MODEL): fqn for fqn in manifest.tensors if fqn.startswith(MODEL)}
    for first, tied in manifest.about.get("names", {}).items():
        for name in tied:
            names[name] = MODEL + first
            # Other programs read a tied parameter under all its names; here it is one tensor.
            if name != first:
                manifest.tensors.pop(MODEL + name, None)
    return Checkpoint(folder, manifest, names, metadata)


def open_foreign(folder: Path) -> Checkpoint:
    """Open a checkpoint of another program; PlanError if it cannot be read, or is not complete."""
    from autoptd.runtime.checkpoint.storage import load_item, open_data, read_metadata

    metadata = read_metadata((folder / METADATA).read_bytes(), str(folder / METADATA))
    ends: dict[str, int] = {}
    for info in metadata.storage_data.values():
        ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
    check_files(folder, ends, may_be_longer=True)
    manifest, groups = Manifest({"optimizer": None}), dict[Any, dict[str, Any]]()
    places = {index.fqn: info for index, info in metadata.storage_data.items()}
    for (kind, *where), name in add_tensors(manifest, metadata):
        if kind not in ("state", "group"):
            continue
        info = places[name]
        with open_data(folder / info.relative_path, None) as file:
            value = encode(load_item(file, info.offset, info.length, name), name)
        into = manifest.values if kind == "state" else groups
        into.setdefault(where[0], {})[where[1]] = value
    manifest.about["optimizer"] = _optimizer(groups)
    return _checkpoint(folder, manifest, metadata)


def _optimizer(groups: Mapping[Any, dict[str, Any]]) -> dict[str, Any] | None:
    """Return the optimizer's record: the groups are numbered, or their settings are stored by parameter."""
    if not groups:
        return None
    numbered = sorted(key for key in groups if isinstance(key, int))
    if numbered:
        return {"class": None, "groups": [groups[key] for key in numbered]}
    found: list[dict[str, Any]] = []
    for name, settings in groups.items():
        alike = next((g for g in found if {**g, "params": 0} == {**settings, "params": 0}), None)
        if alike is None:
            found.append(alike := {**settings, "params": []})
        alike["params"].append(name)
    return {"class": None, "groups": found}


class Reader:
    """Reads for one rank, and counts the bytes. Not thread-safe."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._tensors = checkpoint.manifest.tensors
        self.nbytes = 0

    @torch.no_grad()
    def fill(self, wants: Iterable[Want]) -> None:
        """Fill the tensors of `wants`; RuntimeFault if a block was changed, or a file cannot be read."""
        from autoptd.runtime.checkpoint.storage import read_items, reads_of

        metadata, reads = self._checkpoint.metadata, []
        for want in wants:
            reads += reads_of(metadata, self._tensors[want.fqn].fqn, want.offsets, want.into)
        self.nbytes += read_items(self._checkpoint.path, metadata, reads, self._checkpoint.crcs_of)

    def has(self, name: str) -> bool:
        return name in self._checkpoint.names

    def whole(self, name: str) -> torch.Tensor:
        """Return a parameter or buffer as a new tensor."""
        return self.tensor(self._checkpoint.names[name])

    def tensor(self, fqn: str) -> torch.Tensor:
        """Return a tensor by its name in the checkpoint."""
        record = self._tensors[fqn]
        x = torch.empty(record.shape, dtype=dtype_of(record.dtype), device="cpu")
        self.fill([Want(fqn, (0,) * x.dim(), x)])
        return x

    def rows(self, name: str, dim: int, rows: torch.Tensor) -> torch.Tensor:
        """Read the entries `rows` along `dim`, counted from 1, in this order; a 0 stands for zeros (padding)."""
        fqn = self._checkpoint.names[name]
        record = self._tensors[fqn]
        shape = (*record.shape[:dim], len(rows), *record.shape[dim + 1 :])
        x = torch.zeros(shape, dtype=dtype_of(record.dtype), device="cpu")
        wants, at = [], 0
        for first, count in _runs(rows.tolist()):
            part = x.narrow(dim, at, count)
            offsets = [0] * len(shape)
            offsets[dim] = first - 1
            if first:
                wants.append(Want(fqn, tuple(offsets), part))
            at += count
        self.fill(wants)
        return x


def _runs(rows: list[int]) -> Iterator[tuple[int, int]]:
    """Yield (first, count) of runs of consecutive numbers, and (0, count) of zeros, in order."""
    start = 0
    for i in range(1, len(rows) + 1):
        step = 1 if rows[start] else 0
        if i == len(rows) or rows[i] - rows[i - 1] != step:
            yield rows[start], i - start
            start = i


def verify_files(path: str | os.PathLike[str]) -> list[str]:
    """Read all files of a checkpoint, and describe every change; the list is empty if there is none."""
    folder = find(Path(path))
    manifest = opened_manifest(folder)
    findings = []
    for file, record in manifest.files.items():
        try:
            if "crc32" in record:
                read_checked(folder, manifest, file)
            else:
                findings += _changed_blocks(Checkpoint(folder, manifest, {}, None), file)
        except (PlanError, OSError) as error:
            findings.append(str(error))
    # A damaged file of checksums is met again at the file that it belongs to.
    return list(dict.fromkeys(findings))


def _changed_blocks(checkpoint: Checkpoint, file: str) -> list[str]:
    findings = []
    with (checkpoint.path / file).open("rb") as opened:
        for block, crc in enumerate(checkpoint.crcs_of(file) or ()):
            if zlib.crc32(opened.read(BLOCK_BYTES)) != crc:
                metadata, start = open_checkpoint(checkpoint.path).metadata, block * BLOCK_BYTES
                names = _names_in(metadata, file, start, start + BLOCK_BYTES)
                where = f", with {', '.join(names[:3])}" if names else ""
                findings.append(f"{file}: block {block} was changed{where}")
    return findings


def _names_in(metadata: Any, file: str, start: int, end: int) -> list[str]:
    """Return the tensors with elements in bytes `start` to `end` of a file."""
    found: dict[str, None] = {}
    for index, info in metadata.storage_data.items():
        is_in = info.relative_path == file and info.offset < end and info.offset + info.length > start
        if is_in and index.offset is not None:
            found[index.fqn] = None
    return list(found)
