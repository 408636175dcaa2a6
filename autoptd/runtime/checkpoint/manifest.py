"""The format of a checkpoint: `checkpoint.json`, the names of tensors in `.metadata`, and the tensors that
ranks write.

In: JSON, and the metadata of torch.distributed.checkpoint. Out: a `Manifest`: the model and optimizer that
were saved, the size of each file, and the names, shapes and dtypes of tensors. Reading it executes nothing,
and accepts no file name that leads out of the folder.

    manifest = read_manifest(Path("ckpts/step-00001000"))
    add_tensors(manifest, metadata)
    manifest.tensors["model.lm_head.weight"].shape

The first line of the JSON is the CRC32 of the rest. `encode` and `decode` turn optimizer settings into JSON
and back, exactly.
"""

from __future__ import annotations

import json
import math
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from autoptd.errors import PlanError, a_type
from autoptd.ir.rectangles import Sizes

MANIFEST, METADATA, EXTRA = "checkpoint.json", ".metadata", "extra.pt"
# Of checkpoint.json: version 1 listed the tensors as well, and the other files have not changed since.
VERSION, KNOWN_VERSIONS = 2, (1, 2)
MODEL, STATE, GROUPS = "model.", "optimizer.state.", "optimizer.param_groups."
OPTIMIZERS = ("optimizer", "optim")
DAMAGED = "another checkpoint: this one was changed after it was written"
PLAIN = (bool, int, str, type(None))


class TensorRecord(NamedTuple):
    """A saved tensor, by its name in `.metadata`; `dtype` is a name such as "float32"."""

    fqn: str
    shape: Sizes
    dtype: str


@dataclass
class Manifest:
    """The content of a checkpoint. `about` describes the run (`about_program`, and additions of `commit.py`
    and `model/checkpoints.py`).

    `state` has the keys of the tensors in the optimizer state of each parameter, `values` the other entries
    of that state. `files` has the size of every file and, if it is read as a whole, its CRC32.
    """

    about: dict[str, Any]
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    files: dict[str, dict[str, int]] = field(default_factory=dict)
    tensors: dict[str, TensorRecord] = field(default_factory=dict)
    state: dict[str, list[str]] = field(default_factory=dict)

    @property
    def optimizer(self) -> dict[str, Any] | None:
        """The saved class and groups of the optimizer, if there was one."""
        found: dict[str, Any] | None = self.about.get("optimizer")
        return found

    def text(self) -> bytes:
        """Return the content of the file."""
        parts: dict[str, Any] = {"version": VERSION, **self.about, "values": self.values, "files": self.files}
        body = ",\n".join(f"{json.dumps(key)}: {json.dumps(part)}" for key, part in parts.items()) + "\n}\n"
        return f'{{"crc32": {zlib.crc32(body.encode())},\n{body}'.encode()


@dataclass(frozen=True)
class StagedTensor:
    """A rectangle of the tensor of shape `shape` that a checkpoint has under `name` and `key`."""

    name: str
    key: str
    shape: Sizes
    offsets: Sizes
    x: torch.Tensor

    @property
    def fqn(self) -> str:
        return fqn(self.name, self.key)

    @classmethod
    def whole(cls, name: str, key: str, x: torch.Tensor) -> StagedTensor:
        """Return a tensor that one rank writes alone."""
        return cls(name, key, tuple(x.shape), (0,) * x.dim(), x)


@dataclass
class Staged:
    """What one rank writes: tensors, and the other entries of the optimizer state by parameter, as JSON."""

    rank: int
    tensors: list[StagedTensor] = field(default_factory=list)
    values: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(item.x.nbytes for item in self.tensors)


def fqn(name: str, key: str) -> str:
    """Return the name in a checkpoint of a parameter or, with `key`, of a tensor in its optimizer state."""
    return f"{STATE}{name}.{key}" if key else MODEL + name


def path_of_item(name: str, key: str) -> tuple[Any, ...]:
    """Return the path of such a tensor in nested state dicts."""
    return ("optimizer", "state", name, key) if key else ("model", name)


def path_of_group(name: str) -> tuple[Any, ...]:
    """Return the path of `optimizer.param_groups.0.lr` in nested dicts and lists."""
    number, _, key = name.removeprefix(GROUPS).partition(".")
    return "optimizer", "param_groups", int(number), key


def place_of(path: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the meaning of an entry at a path in nested state dicts: ("model", name), ("state", name, key),
    ("group", i, key).
    """
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


def add_tensors(manifest: Manifest, metadata: Any) -> list[tuple[tuple[Any, ...], str]]:
    """Add the tensors of the metadata; return its other entries, as (what it is: see `place_of`, name)."""
    objects = []
    paths = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
    for name, entry in metadata.state_dict_metadata.items():
        where = place_of(tuple(paths.get(name, (name,))))
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


def crc_file(file: str) -> str:
    """Return the name of the file with the CRC32s of a data file."""
    return file.removesuffix(".distcp") + ".crc"


def read_manifest(folder: Path) -> Manifest:
    """Read checkpoint.json; PlanError if it is damaged, too new, or names files outside of the folder."""
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
        raise PlanError(site, f"does not have the format that AutoPTD writes: {error!r}", DAMAGED) from error
    return Manifest(record, **parts)


def check_inside(file: str, site: str) -> None:
    """Raise PlanError unless this is the name of a file in the folder itself."""
    if not file or file in (".", "..") or "/" in file or "\\" in file or "\0" in file:
        remedy = "do not use it: no checkpoint of AutoPTD has such names"
        raise PlanError(site, f"names the file {file!r}, which is not in its folder", remedy)


def check_files(folder: Path, sizes: dict[str, int], *, may_be_longer: bool = False) -> None:
    """Raise PlanError that lists all files that are missing, links, or not of these sizes in bytes."""
    findings = []
    for file, nbytes in sizes.items():
        path = folder / file
        if path.is_symlink():
            findings.append(f"{file} is a link")
        elif not path.is_file():
            findings.append(f"{file} is missing")
        elif (size := path.stat().st_size) != nbytes and not (may_be_longer and size > nbytes):
            findings.append(f"{file} has {size} bytes, not {nbytes}")
    if findings:
        raise PlanError(str(folder), "; ".join(findings), "another checkpoint, or all files of this one")


def opened_manifest(folder: Path) -> Manifest:
    """Read checkpoint.json, and check that all files are there."""
    manifest = read_manifest(folder)
    check_files(folder, {file: record["bytes"] for file, record in manifest.files.items()})
    return manifest


def read_checked(folder: Path, manifest: Manifest, file: str) -> bytes:
    """Return the content of a small file; PlanError if it was changed."""
    data = (folder / file).read_bytes()
    if zlib.crc32(data) != manifest.files.get(file, {}).get("crc32"):
        raise PlanError(
            str(folder / file), "has another CRC32 than when it was written", "another checkpoint"
        )
    return data


def encode(value: Any, site: str) -> Any:
    """Return a value of an optimizer group, or of its state, as JSON; PlanError if `decode` could not restore
    it.

    encode((0.9, 0.95), site) == {"tuple": [0.9, 0.95]}
    """
    if is_numpy_number(value):
        # Keep the type: a product with a float32 is rounded to float32, one with a Python float is not.
        return {"numpy": value.dtype.name, "value": encode(value.item(), site)}
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, tuple):
        return {"tuple": [encode(item, site) for item in value]}
    if isinstance(value, list):
        return [encode(item, site) for item in value]
    if isinstance(value, torch.Tensor):
        numbers = encode(value.detach().cpu().tolist(), site)
        return {"tensor": numbers, "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {key: encode(item, site) for key, item in value.items()}}
    fact = f"is {a_type(value)}, which a checkpoint cannot hold"
    raise PlanError(site, fact, "numbers, strings, tensors, tuples, lists and dicts of these")


def decode(value: Any) -> Any:
    """Return the value that `encode` was given."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "float" in value:
        return float(value["float"])
    if "numpy" in value:
        import numpy

        return numpy.dtype(value["numpy"]).type(decode(value["value"]))
    if "tuple" in value:
        return tuple(map(decode, value["tuple"]))
    if "tensor" in value:
        return torch.tensor(decode(value["tensor"]), dtype=getattr(torch, value["dtype"]), device="cpu")
    return {key: decode(item) for key, item in value["dict"].items()}


def is_numpy_number(value: Any) -> bool:
    """Tell whether a value is a NumPy number that Python can represent, such as a learning rate computed with
    NumPy.
    """
    numpy = sys.modules.get("numpy")
    # The item of a long double is a long double again.
    return (
        numpy is not None
        and isinstance(value, numpy.generic)
        and isinstance(value.item(), (bool, int, float))
    )


def without_numpy(value: Any) -> Any:
    """Return a value with Python numbers instead of NumPy's: other programs read these without unpickling
    code.
    """
    if isinstance(value, (tuple, list)):
        return type(value)(map(without_numpy, value))
    return value.item() if is_numpy_number(value) else value


def rows_of(x: torch.Tensor, offsets: Sizes, most_bytes: int) -> Iterator[tuple[Sizes, torch.Tensor]]:
    """Yield slices of at most `most_bytes` with their offsets, along the first dim of more than one entry."""
    dim = next((dim for dim, size in enumerate(x.shape) if size > 1), 0)
    if x.nbytes <= most_bytes:
        yield offsets, x
        return
    rows = max(1, most_bytes * x.shape[dim] // x.nbytes)
    for row, part in zip(range(0, x.shape[dim], rows), x.split(rows, dim), strict=True):
        yield (*offsets[:dim], offsets[dim] + row, *offsets[dim + 1 :]), part
