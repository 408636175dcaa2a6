"""Read weights from a folder of Hugging Face's format; every rank reads only its part.

In: a folder written by `save_pretrained`: `model.safetensors`, or `model.safetensors.index.json` and the
files that it names. Out: names, shapes and dtypes from the headers; whole tensors, or some of their rows, on
request.

    folder = open_folder("llama-8b")
    folder.entries["lm_head.weight"].shape                        # (128256, 4096): nothing else was read
    folder.reader().rows("lm_head.weight", dim=0, rows=rows)      # these rows, in this order

Where the model's names differ from those in the files (by a prefix), `renamed` returns the folder with the
model's names. A folder is a `Source` (program/sources.py).
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from autoptd.errors import PlanError
from autoptd.runtime.folders.disk import new_file

# Ranks compare this number of bytes at the start, in the middle and at the end of every file.
SAMPLE_BYTES = 4096
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# By their names in the headers.
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
    """One tensor of a folder: its name in `file`, and its header. `dtype` is None for one that torch does not have."""

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
        """Return the same tensors under other names, given as old name -> new name."""
        return replace(self, entries={names.get(name, name): entry for name, entry in self.entries.items()})

    def only(self, names: Iterable[str]) -> Folder:
        """Return those of the tensors that have one of these names."""
        return replace(self, entries={name: self.entries[name] for name in names if name in self.entries})

    def reader(self) -> FolderReader:
        return FolderReader(self)

    def fingerprint(self) -> str:
        """Hash the names and lengths of the files, and samples of their bytes: weights of another step hash differently."""
        return hashlib.sha256(repr(sorted(self.parts().items())).encode()).hexdigest()[:16]

    def parts(self) -> dict[str, str]:
        """Hash each file."""
        found = {}
        for file in sorted({entry.file for entry in self.entries.values()}):
            size = file.stat().st_size
            state = hashlib.sha256(f"{size}".encode())
            with file.open("rb") as opened:
                # Hashing whole files would read every weight on every rank before the start.
                for start in (0, size // 2, max(size - SAMPLE_BYTES, 0)):
                    opened.seek(start)
                    state.update(opened.read(SAMPLE_BYTES))
            found[file.name] = state.hexdigest()[:16]
        return found

    def difference(self, names: list[str]) -> tuple[str, str]:
        """Return (fact, remedy) for a rank that found other files of these names."""
        fact = f"found other files in {str(self.path)!r} than rank 0 ({', '.join(names)})"
        return fact, "give every node the same folder"


class FolderReader:
    """Reads the files of a folder, each opened once; not thread-safe."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._files: dict[Path, Any] = {}

    def has(self, name: str) -> bool:
        return name in self._folder.entries

    def whole(self, name: str) -> torch.Tensor:
        """Return a tensor as a copy."""
        entry = self._folder.entries[name]
        x: torch.Tensor = self._open(entry.file).get_tensor(entry.name)
        # `x` may be the mapped file, which may be overwritten later.
        return x.clone()

    def rows(self, name: str, dim: int, rows: torch.Tensor) -> torch.Tensor:
        """Read the entries `rows` along `dim`, counted from 1, in this order; a 0 stands for zeros (padding)."""
        entry = self._folder.entries[name]
        source = self._open(entry.file).get_slice(entry.name)
        before = (slice(None),) * dim
        # A slice per run of consecutive entries, read from the file; a fused q|k|v has one per block.
        pieces = [source[(*before, slice(first - 1, last))] for first, last in runs(rows)]
        padding = int((rows == 0).sum())
        shape = [*entry.shape[:dim], padding, *entry.shape[dim + 1 :]]
        return torch.cat([*pieces, torch.zeros(shape, dtype=entry.dtype, device="cpu")], dim)

    def _open(self, file: Path) -> Any:
        if file not in self._files:
            self._files[file] = open_file(file)
        return self._files[file]


def runs(rows: torch.Tensor) -> list[tuple[int, int]]:
    """Return (first, last) of every run of consecutive numbers: (3, 5), (9, 9) for [3, 4, 5, 9, 0]. Zeros come last."""
    real = rows[rows > 0]
    # The index of the last number of each run but the last one: [2] for [3, 4, 5, 9].
    ends = torch.nonzero(real.diff() != 1).flatten()
    first = torch.cat([real[:1], real[ends + 1]]).tolist()
    last = torch.cat([real[ends], real[-1:]]).tolist()
    return list(zip(first, last, strict=True))


def open_file(file: Path) -> Any:
    """Open a safetensors file, reading its header only; PlanError where that fails."""
    safetensors = library()
    try:
        return safetensors.safe_open(str(file), framework="pt", device="cpu")
    except (safetensors.SafetensorError, OSError) as error:
        raise PlanError(
            f"weights={str(file)!r}", f"cannot be read: {error}", "fetch or write the file again"
        ) from error


def library() -> Any:
    """Import the package safetensors, which is optional; PlanError where it is missing."""
    try:
        import safetensors.torch
    except ImportError:
        fact = "is not installed, and folders of Hugging Face's format are read and written by it"
        raise PlanError("package safetensors", fact, "pip install 'autoptd[hf]'") from None
    return safetensors


def open_folder(path: str | os.PathLike[str]) -> Folder:
    """Read the headers of a folder's files; PlanError where there are none, or they are not those of the index."""
    path = Path(path)
    site = f"weights={str(path)!r}"
    if not path.is_dir():
        remedy = "a folder with a model's files: what save_pretrained wrote, or snapshot_download fetched"
        raise PlanError(site, "there is no such folder", remedy)
    # Before the index, as Hugging Face's readers look: of both, the single file counts.
    if (path / SINGLE).exists():
        return Folder(path, headers(path / SINGLE))
    if not (path / INDEX).exists():
        raise PlanError(site, *nothing_to_read(path))
    file_of: dict[str, str] = json.loads((path / INDEX).read_text())["weight_map"]
    files = sorted(set(file_of.values()))
    if lost := [file for file in files if not (path / file).exists()]:
        raise PlanError(
            site, f"its index names files that are not there: {', '.join(lost)}", "fetch all of its files"
        )
    entries = {file: headers(path / file) for file in files}
    if lost := [name for name, file in file_of.items() if name not in entries[file]]:
        raise PlanError(
            site, f"its index names tensors that are not there: {', '.join(lost)}", "write it again"
        )
    return Folder(path, {name: entries[file][name] for name, file in file_of.items()})


def headers(file: Path) -> dict[str, Entry]:
    """Read the header of a file: its tensors by name."""
    opened = open_file(file)
    entries = {}
    for name in opened.keys():  # noqa: SIM118 - not a dict
        header = opened.get_slice(name)
        entries[name] = Entry(file, name, tuple(header.get_shape()), DTYPES.get(header.get_dtype()))
    return entries


def nothing_to_read(path: Path) -> tuple[str, str]:
    """Return (fact, remedy) for a folder without safetensors."""
    pickled = [*path.glob("*.bin"), *path.glob("*.pt*")]
    if pickled:
        fact = f"holds pickled weights ({pickled[0].name}), which are not read"
        return fact, "convert it once: AutoModelForCausalLM.from_pretrained(folder).save_pretrained(another)"
    return f"holds neither {SINGLE} nor {INDEX}", "a folder as save_pretrained writes it"


NAMES = {dtype: name for name, dtype in DTYPES.items()}
# Bytes that a header is filled up to a multiple of.
ALIGNMENT = 8


def write_safetensors(
    path: Path, tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]], values: Iterable[torch.Tensor]
) -> None:
    """Write the tensors `values`, of the dtypes and shapes that `tensors` says, in its order."""
    # transformers refuses a file without this entry.
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + torch.Size(shape).numel() * dtype.itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    with new_file(path) as file:
        file.write(struct.pack("<Q", len(text)))
        file.write(text)
        for x in values:
            if x.numel():
                own = x.detach().cpu().contiguous()
                elements = (ctypes.c_char * own.nbytes).from_address(own.data_ptr())
                file.write(memoryview(elements))
