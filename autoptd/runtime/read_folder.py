"""Weights in a folder of Hugging Face's format, of which every rank reads its own part and no more.

In: a folder as `save_pretrained` writes it: `model.safetensors`, or `model.safetensors.index.json` and the files that it names.
Out: names, shapes and dtypes from the headers; whole tensors, or some rows of them, when they are asked for.

    folder = open_folder("llama-8b")
    folder.entries["lm_head.weight"].shape                        # (128256, 4096): nothing else was read
    folder.reader().rows("lm_head.weight", dim=0, rows=rows)      # these rows, in this order

`names` says what the model calls a tensor of the files, where the two differ (a prefix).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from autoptd.errors import PlanError

SAMPLE = (
    4096  # bytes at the start, in the middle and at the end of a file, by which ranks compare what they read
)
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}


@dataclass(frozen=True)
class Entry:
    """One tensor of a folder: its name in `file`, and what the header says. `dtype` is None for one that is not read."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None


@dataclass(frozen=True)
class Folder:
    """The tensors of a folder, by the names that the model has for them."""

    path: Path
    entries: Mapping[str, Entry]

    def renamed(self, names: Mapping[str, str]) -> Folder:
        """The same tensors under other names: old name -> new name."""
        return replace(self, entries={names.get(name, name): entry for name, entry in self.entries.items()})

    def reader(self) -> Reader:
        return Reader(self)

    def fingerprint(self) -> str:
        """Hash of what the files are called, how long they are, and some KB of each: another step's weights have another."""
        found = hashlib.sha256()
        for file in sorted({entry.file for entry in self.entries.values()}):
            size = file.stat().st_size
            found.update(f"{file.name} {size}".encode())
            with file.open("rb") as opened:
                for start in (0, size // 2, max(size - SAMPLE, 0)):
                    opened.seek(start)
                    found.update(opened.read(SAMPLE))
        return found.hexdigest()[:16]


class Reader:
    """Reads from the files of a folder, each opened once; for one thread."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._files: dict[Path, Any] = {}

    def has(self, name: str) -> bool:
        return name in self._folder.entries

    def whole(self, name: str) -> torch.Tensor:
        """Return a tensor, in memory of its own."""
        entry = self._folder.entries[name]
        found: torch.Tensor = self._open(entry.file).get_tensor(entry.name)
        return found.clone()  # the file may be mapped into memory, and written anew later

    def rows(self, name: str, dim: int, rows: torch.Tensor) -> torch.Tensor:
        """Return the entries `rows` along `dim`, counted from 1, in this order; zeros for each 0. Nothing else is read."""
        entry = self._folder.entries[name]
        source, before = self._open(entry.file).get_slice(entry.name), (slice(None),) * dim
        pieces = [source[(*before, slice(first - 1, last))] for first, last in runs(rows)]
        padding = int((rows == 0).sum())
        shape = [*entry.shape[:dim], padding, *entry.shape[dim + 1 :]]
        return torch.cat([*pieces, torch.zeros(shape, dtype=entry.dtype)], dim)

    def _open(self, file: Path) -> Any:
        if file not in self._files:
            self._files[file] = open_file(file)
        return self._files[file]


def runs(rows: torch.Tensor) -> list[tuple[int, int]]:
    """(first, last) of every stretch of consecutive numbers: [3, 4, 5, 9, 0] gives (3, 5), (9, 9); zeros are at the end."""
    real = rows[rows > 0]
    ends = torch.nonzero(real.diff() != 1).flatten()
    first = torch.cat([real[:1], real[ends + 1]]).tolist()
    last = torch.cat([real[ends], real[-1:]]).tolist()
    return list(zip(first, last, strict=True))


def open_file(file: Path) -> Any:
    """Open a safetensors file: its header is read, nothing else."""
    safetensors = library()
    try:
        return safetensors.safe_open(str(file), framework="pt", device="cpu")
    except (safetensors.SafetensorError, OSError) as error:
        raise PlanError(
            f"weights={str(file)!r}", f"cannot be read: {error}", "fetch or write the file anew"
        ) from error


def library() -> Any:
    """The package safetensors, which is optional."""
    try:
        import safetensors.torch
    except ImportError:
        fact = "is not installed, and folders of Hugging Face's format are read and written by it"
        raise PlanError("package safetensors", fact, "pip install 'autoptd[hf]'") from None
    return safetensors


def open_folder(path: str | os.PathLike[str]) -> Folder:
    """Read the headers of a folder's files; PlanError where there is none, or the files are not those of the index."""
    path = Path(path)
    site = f"weights={str(path)!r}"
    if not path.is_dir():
        remedy = "a folder with a model's files: what save_pretrained wrote, or snapshot_download fetched"
        raise PlanError(site, "there is no such folder", remedy)
    if (path / SINGLE).exists():
        return Folder(path, headers(path / SINGLE))
    if not (path / INDEX).exists():
        raise PlanError(site, *nothing_to_read(path))
    said: dict[str, str] = json.loads((path / INDEX).read_text())["weight_map"]
    files = sorted(set(said.values()))
    if lost := [file for file in files if not (path / file).exists()]:
        raise PlanError(
            site, f"its index names files that are not there: {', '.join(lost)}", "fetch all of its files"
        )
    found = {file: headers(path / file) for file in files}
    if lost := [name for name, file in said.items() if name not in found[file]]:
        raise PlanError(
            site, f"its index names tensors that are not there: {', '.join(lost)}", "write it anew"
        )
    return Folder(path, {name: found[file][name] for name, file in said.items()})


def headers(file: Path) -> dict[str, Entry]:
    """What a file holds."""
    opened = open_file(file)
    slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 - it is no dict
    return {
        name: Entry(file, name, tuple(one.get_shape()), DTYPES.get(one.get_dtype()))
        for name, one in slices.items()
    }


def nothing_to_read(path: Path) -> tuple[str, str]:
    """(fact, remedy) for a folder without safetensors."""
    if any(path.glob("*.bin")) or any(path.glob("*.pt*")):
        fact = f"holds pickled weights ({next(iter([*path.glob('*.bin'), *path.glob('*.pt*')])).name}), which are not read"
        return fact, "convert it once: AutoModelForCausalLM.from_pretrained(folder).save_pretrained(another)"
    return f"holds neither {SINGLE} nor {INDEX}", "a folder as save_pretrained writes it"
