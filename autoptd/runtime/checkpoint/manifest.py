"""What a checkpoint holds: `checkpoint.json`, and the tensors of `.metadata` by the model's names.

In: JSON, and the metadata of torch.distributed.checkpoint. Out: what the model and the optimizer were, the sizes of all files;
names, shapes and dtypes of tensors. Nothing here is executed, and no name leads out of the folder.

    manifest = read_manifest(Path("ckpts/step-00001000"))
    add_tensors(manifest, metadata)
    manifest.tensors["model.lm_head.weight"].shape

The first line of the JSON is the CRC32 of the rest.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from autoptd.errors import PlanError
from autoptd.ir.rectangles import Sizes

MANIFEST, METADATA, EXTRA = "checkpoint.json", ".metadata", "extra.pt"
# Of the format of checkpoint.json: 1 listed the tensors, too.
VERSION, KNOWN_VERSIONS = 2, (1, 2)
MODEL, STATE, GROUPS = "model.", "optimizer.state.", "optimizer.param_groups."
OPTIMIZERS = ("optimizer", "optim")
DAMAGED = "another checkpoint: this one was changed after it was written"


class TensorRecord(NamedTuple):
    """One tensor, and its name in `.metadata`; `dtype` is a name such as "float32"."""

    fqn: str
    shape: Sizes
    dtype: str


@dataclass
class Manifest:
    """The content of a checkpoint. `about` holds everything that is not needed to find a tensor: see
    `save.py`.

    `state` lists, by parameter, the keys of the tensors in the optimizer's state, `values` holds its other
    entries, and `files` the size of every file and, for files that are read whole, the CRC32.
    """

    about: dict[str, Any]
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    files: dict[str, dict[str, int]] = field(default_factory=dict)
    tensors: dict[str, TensorRecord] = field(default_factory=dict)
    state: dict[str, list[str]] = field(default_factory=dict)

    @property
    def optimizer(self) -> dict[str, Any] | None:
        """Return the saved class and groups of the optimizer; None without one."""
        found: dict[str, Any] | None = self.about.get("optimizer")
        return found

    def text(self) -> bytes:
        """Return the content of the file."""
        parts: dict[str, Any] = {"version": VERSION, **self.about, "values": self.values, "files": self.files}
        body = ",\n".join(f"{json.dumps(key)}: {json.dumps(part)}" for key, part in parts.items()) + "\n}\n"
        return f'{{"crc32": {zlib.crc32(body.encode())},\n{body}'.encode()


def fqn(name: str, key: str) -> str:
    """Return the name in a checkpoint of a parameter, or of the tensor under `key` in an optimizer's state of it."""
    return f"{STATE}{name}.{key}" if key else MODEL + name


def path_of_item(name: str, key: str) -> tuple[Any, ...]:
    """Return where such a tensor is in nested state dicts."""
    return ("optimizer", "state", name, key) if key else ("model", name)


def path_of_group(name: str) -> tuple[Any, ...]:
    """Return where `optimizer.param_groups.0.lr` is in nested dicts and lists."""
    number, _, key = name.removeprefix(GROUPS).partition(".")
    return "optimizer", "param_groups", int(number), key


def crc_file(file: str) -> str:
    """Return the name of the file with the CRCs of a data file."""
    return file.removesuffix(".distcp") + ".crc"


def read_manifest(folder: Path) -> Manifest:
    """Read checkpoint.json; PlanError where it is damaged, newer, or leads out of the folder."""
    site = str(folder / MANIFEST)
    try:
        text = (folder / MANIFEST).read_bytes()
        record = json.loads(text)
        crc, version = record.pop("crc32"), record.pop("version")
        is_same = version not in KNOWN_VERSIONS or crc == zlib.crc32(text.split(b"\n", 1)[1])
    except (ValueError, LookupError, AttributeError, TypeError, OSError) as error:
        raise PlanError(site, f"cannot be read: {error}", DAMAGED) from error
    if version not in KNOWN_VERSIONS:
        fact = f"has format {version}, and this version of AutoPTD reads formats up to {VERSION}"
        raise PlanError(site, fact, "the version of AutoPTD that wrote it")
    if not is_same:
        raise PlanError(site, "has another CRC32 than when it was written", DAMAGED)
    try:
        parts = {key: dict(record.pop(key)) for key in ("values", "files")}
        for name in ("tensors", "state"):
            record.pop(name, None)
        for file, entry in parts["files"].items():
            check_inside(file, site)
            int(entry["bytes"])
    except (KeyError, TypeError, ValueError) as error:
        raise PlanError(site, f"is not as AutoPTD writes it: {error!r}", DAMAGED) from error
    return Manifest(record, **parts)


def check_inside(file: str, site: str) -> None:
    """Raise PlanError for a name that is not that of a file in the folder itself."""
    if not file or file in (".", "..") or "/" in file or "\\" in file or "\0" in file:
        remedy = "do not use it: no checkpoint of AutoPTD has such names"
        raise PlanError(site, f"names the file {file!r}, which is not in its folder", remedy)


def add_tensors(manifest: Manifest, metadata: Any) -> list[tuple[tuple[Any, ...], str]]:
    """Add the tensors of the metadata; return what it has besides: places (see `place_of`) and names of objects."""
    objects = []
    for name, where in places_of(metadata):
        entry = metadata.state_dict_metadata[name]
        if not hasattr(entry, "chunks"):
            objects.append((where, name))
            continue
        record = TensorRecord(name, tuple(entry.size), str(entry.properties.dtype).removeprefix("torch."))
        if where[0] == "model":
            manifest.tensors[MODEL + where[1]] = record
        elif where[0] == "state":
            manifest.tensors[fqn(where[1], where[2])] = record
            manifest.state.setdefault(where[1], []).append(where[2])
    return objects


def places_of(metadata: Any) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield the name of each entry, and what it is."""
    paths = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
    for name in metadata.state_dict_metadata:
        yield name, place_of(tuple(paths.get(name, (name,))))


def place_of(path: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return what an entry is, by its path in nested state dicts: ("model", name), ("state", name, key), ("group", i, key)."""
    *before, last = path
    if len(before) >= 3 and before[-3] in OPTIMIZERS and before[-2] in ("state", "param_groups"):
        return ("state" if before[-2] == "state" else "group"), before[-1], last
    if not before or before[-1] in OPTIMIZERS:
        # Flattened: `state.lm_head.weight.exp_avg`, `param_groups.lm_head.weight.lr`.
        kind, _, rest = str(last).partition(".")
        name, _, key = rest.rpartition(".")
        if kind in ("state", "param_groups") and name:
            return ("state" if kind == "state" else "group"), name, key
    if not before or before[-1] == "model":
        return "model", str(last)
    return "", ".".join(map(str, path))


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
    if zlib.crc32(data) != manifest.files.get(file, {}).get("crc32"):
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
    "Manifest",
    "TensorRecord",
    "add_tensors",
    "check_files",
    "check_inside",
    "crc_file",
    "fqn",
    "path_of_group",
    "path_of_item",
    "read_checked",
    "read_manifest",
]
