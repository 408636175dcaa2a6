"""What a checkpoint holds, and where: `checkpoint.json`, the one file that says it.

In: JSON. Out: tensors by name, each with the rectangles that make it up and the file and byte where each begins; what the
model and the optimizer were; the sizes of all files. Nothing here is executed, and no name leads out of the folder.

    manifest = read_manifest(Path("ckpts/step-00001000"))
    manifest.tensors["model.lm_head.weight"].chunks[0].file      # "__3_0.distcp"

The first line is the CRC32 of the rest.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from autoptd.errors import PlanError
from autoptd.ir.rectangles import Sizes

MANIFEST, METADATA, EXTRA = "checkpoint.json", ".metadata", "extra.pt"
# Of the format of checkpoint.json.
VERSION = 1
MODEL, STATE, GROUPS = "model.", "optimizer.state.", "optimizer.param_groups."


class Chunk(NamedTuple):
    """A rectangle of a tensor: its elements, row by row, begin at byte `at` of `file`."""

    offsets: Sizes
    sizes: Sizes
    file: str
    at: int


@dataclass
class TensorRecord:
    """One tensor: `dtype` is a name such as "float32"."""

    shape: Sizes
    dtype: str
    chunks: list[Chunk] = field(default_factory=list)


@dataclass
class Manifest:
    """The content of a checkpoint. `about` is what is not needed to find a tensor: see `save.py`.

    `state` has, by parameter, the keys under which an optimizer's state has tensors, `values` what it has besides, and
    `files` the bytes of every file and, of those that are read whole, its CRC32.
    """

    about: dict[str, Any]
    tensors: dict[str, TensorRecord] = field(default_factory=dict)
    state: dict[str, list[str]] = field(default_factory=dict)
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    files: dict[str, dict[str, int]] = field(default_factory=dict)

    @property
    def optimizer(self) -> Mapping[str, Any] | None:
        """What was saved of the optimizer: its class and groups; None without one."""
        found: Mapping[str, Any] | None = self.about.get("optimizer")
        return found

    def text(self) -> bytes:
        """Return the content of the file."""
        tensors = {}
        for name, record in self.tensors.items():
            chunks = [list(chunk) for chunk in record.chunks]
            tensors[name] = {"shape": record.shape, "dtype": record.dtype, "chunks": chunks}
        parts: dict[str, dict[str, Any]] = {
            "tensors": tensors,
            "state": self.state,
            "values": self.values,
            "files": self.files,
        }
        lines = [f"{json.dumps(key)}: {json.dumps(part)}" for key, part in self.about.items()]
        for key, part in parts.items():
            # A line for each tensor, so that people can read it.
            inner = ",\n ".join(f"{json.dumps(name)}: {json.dumps(item)}" for name, item in part.items())
            lines.append(f"{json.dumps(key)}: {{\n {inner}\n}}")
        body = ",\n".join([f'"version": {VERSION}', *lines]) + "\n}\n"
        return f'{{"crc32": {zlib.crc32(body.encode())},\n{body}'.encode()


def fqn(name: str, key: str) -> str:
    """Return the name in a checkpoint of a parameter, or of the tensor under `key` in an optimizer's state of it."""
    return f"{STATE}{name}.{key}" if key else MODEL + name


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint; PlanError where it is damaged, newer, or leads out of the folder."""
    path = folder / MANIFEST
    site = str(path)
    damaged = "another checkpoint: this one was changed after it was written"
    try:
        text = path.read_bytes()
        record = json.loads(text)
        body = text.split(b"\n", 1)[1]
        crc, version = record.pop("crc32"), record.pop("version")
    except (ValueError, LookupError, AttributeError, OSError) as error:
        raise PlanError(site, f"cannot be read: {error}", damaged) from error
    if version != VERSION:
        fact = f"has format {version}, and this version of AutoPTD reads format {VERSION}"
        raise PlanError(site, fact, "the version of AutoPTD that wrote it")
    if crc != zlib.crc32(body):
        raise PlanError(site, "has another CRC32 than when it was written", damaged)
    try:
        return _parsed(record, site)
    except (KeyError, TypeError, ValueError) as error:
        raise PlanError(site, f"is not as AutoPTD writes it: {error!r}", damaged) from error


def _parsed(record: dict[str, Any], site: str) -> Manifest:
    tensors = {}
    for name, entry in record.pop("tensors").items():
        chunks = [Chunk(tuple(o), tuple(s), str(file), int(at)) for o, s, file, at in entry["chunks"]]
        tensors[name] = TensorRecord(tuple(entry["shape"]), str(entry["dtype"]), chunks)
    parts = {key: record.pop(key) for key in ("state", "values", "files")}
    manifest = Manifest(record, tensors, **parts)
    for file in manifest.files:
        check_inside(file, site)
    for name, tensor in tensors.items():
        check_tensor(name, tensor, manifest.files, site)
    return manifest


def check_inside(file: str, site: str) -> None:
    """Raise PlanError for a name that is not that of a file in the folder itself."""
    if not file or file in (".", "..") or "/" in file or "\\" in file or "\0" in file:
        remedy = "do not use it: no checkpoint of AutoPTD has such names"
        raise PlanError(site, f"names the file {file!r}, which is not in its folder", remedy)


def check_tensor(name: str, tensor: TensorRecord, files: Mapping[str, Any], site: str) -> None:
    """Raise PlanError unless the chunks of a tensor are in known files, inside of it, and all of it together."""
    remedy = "another checkpoint: this one is damaged"
    dtype = getattr(torch, tensor.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise PlanError(site, f"has {name} in {tensor.dtype!r}, which is no dtype of this torch", remedy)
    count = 0
    for chunk in tensor.chunks:
        if chunk.file not in files:
            raise PlanError(site, f"has a part of {name} in {chunk.file!r}, which it does not list", remedy)
        ends = [start + size for start, size in zip(chunk.offsets, chunk.sizes, strict=True)]
        inside = all(end <= size for end, size in zip(ends, tensor.shape, strict=True))
        inside = inside and chunk.at + math.prod(chunk.sizes) * dtype.itemsize <= files[chunk.file]["bytes"]
        if not inside or min(*chunk.offsets, *chunk.sizes, chunk.at, 0) < 0:
            raise PlanError(site, f"has a part of {name} that is not in it", remedy)
        count += math.prod(chunk.sizes)
    if count != math.prod(tensor.shape):
        fact = f"has {count} of the {math.prod(tensor.shape)} elements of {name}"
        raise PlanError(site, fact, remedy)


def check_files(folder: Path, manifest: Manifest) -> None:
    """Raise PlanError that lists all files that are missing, or have another size than when they were written."""
    findings = []
    for file, record in manifest.files.items():
        path = folder / file
        if path.is_symlink():
            findings.append(f"{file} is a link")
        elif not path.is_file():
            findings.append(f"{file} is missing")
        elif (size := path.stat().st_size) != record["bytes"]:
            findings.append(f"{file} has {size} bytes, not {record['bytes']}")
    if findings:
        raise PlanError(str(folder), "; ".join(findings), "another checkpoint, or all files of this one")


def read_checked(folder: Path, manifest: Manifest, file: str) -> bytes:
    """Return the content of a file that is read whole; PlanError where it was changed."""
    data = (folder / file).read_bytes()
    if zlib.crc32(data) != manifest.files[file]["crc32"]:
        raise PlanError(
            str(folder / file), "has another CRC32 than when it was written", "another checkpoint"
        )
    return data


__all__ = [
    "EXTRA",
    "GROUPS",
    "MANIFEST",
    "METADATA",
    "MODEL",
    "STATE",
    "VERSION",
    "Chunk",
    "Manifest",
    "TensorRecord",
    "check_files",
    "fqn",
    "read_checked",
    "read_manifest",
]
