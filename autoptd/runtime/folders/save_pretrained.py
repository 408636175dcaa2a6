"""Write a model that runs on many ranks into a folder of Hugging Face's format.

In: the parameters of all ranks, and what else the folder holds. Out: `model.safetensors`, or several files and
`model.safetensors.index.json`. Rank 0 writes, and holds the tensors of one file at a time.

    files = split_into_files({"wte.weight": 400, "h.0.weight": 300}, limit=500)   # [["wte.weight"], ["h.0.weight"]]

Until everything is written, a reader finds the folder's old weights. A single rename then switches to the new ones: of
`model.safetensors`, or of the index (an older `model.safetensors`, which readers prefer, is removed after it). New files
therefore never have the names of old ones that an index may still list: see `free_names`.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from autoptd.errors import PlanError, RuntimeFault
from autoptd.program.sources import FolderFormat
from autoptd.program.specs import ParamSpec
from autoptd.runtime.folders.read_folder import INDEX, SINGLE, library
from autoptd.runtime.params.full_values import gather_full
from autoptd.runtime.params.parameters import RankParameters
from autoptd.runtime.params.parts import dtype_of

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
# The suffix of a file that is not complete.
PART = ".part"
# What rank 0 writes with.
W = TypeVar("W")


@dataclass
class Contents:
    """The tensors to write, in the order `order`: parameters and others, by their names in the folder."""

    params: dict[str, ParamSpec] = field(default_factory=dict)
    others: dict[str, torch.Tensor] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)

    def sizes(self) -> dict[str, int]:
        """Return the bytes of every tensor, in order."""
        return {name: self._nbytes(name) for name in self.order}

    def _nbytes(self, name: str) -> int:
        return spec_bytes(self.params[name]) if name in self.params else self.others[name].nbytes


def contents_of(
    specs: Sequence[ParamSpec], others: Mapping[str, torch.Tensor], order: Sequence[str], how: FolderFormat
) -> Contents:
    """Collect parameters, and persistent buffers, in the order of the model's state dict."""
    params: dict[str, ParamSpec] = {}
    for spec in specs:
        params |= dict.fromkeys(how.kept_names(spec), spec)
    names: dict[str, str] = {}
    for name in [*order, *params, *others]:
        if name in params or name in others:
            names[name] = how.names.get(name, name)
    return Contents(
        {names[name]: spec for name, spec in params.items()},
        {names[name]: x for name, x in others.items()},
        list(names.values()),
    )


def spec_bytes(spec: ParamSpec) -> int:
    return torch.Size(spec.shape).numel() * dtype_of(spec.dtype).itemsize


def parse_size(size: int | str) -> int:
    """Parse a size in Hugging Face's units: 5_000_000_000 for "5GB"; KB, MB, ... are powers of 1000, KiB, ... of 1024."""
    count = 0
    # "1.5 GB": a number, then a unit in any case, or none.
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(size))
    if match and match[2].upper() in UNITS:
        count = round(float(match[1]) * UNITS[match[2].upper()])
    if count < 1:
        raise PlanError(f"max_shard_size={size!r}", "no size in bytes", "for example '5GB', or 5_000_000_000")
    return count


def split_into_files(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Divide tensors over files, in order, at most `limit` bytes each; larger tensors get separate files."""
    files: list[list[str]] = []
    full = 0
    for name, size in sizes.items():
        if not files or full + size > limit:
            files.append([])
            full = 0
        files[-1].append(name)
        full += size
    return files


def save_folder(params: RankParameters, what: Contents, folder: Path, limit: int, how: FolderFormat) -> None:
    """Write the folder; a collective. RuntimeFault on all ranks if rank 0 cannot write: the old weights are kept."""
    # Missing, it is missing on all ranks: raised here, no rank is left in a gather.
    library()
    params.absorb_edits()
    files = split_into_files(what.sizes(), limit)
    writer = Writer(folder, len(files)) if params.world.rank == 0 else None
    on_rank_0(params, writer, lambda writer: writer.begin())
    for number, names in enumerate(files):
        # Rank 0 holds the tensors of one file at a time.
        tensors = gather_named(params, what, names)
        on_rank_0(params, writer, partial(Writer.write, number=number, tensors=tensors))
    on_rank_0(params, writer, lambda writer: writer.finish(what.sizes(), files, how))


def gather_named(params: RankParameters, what: Contents, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Return tensors of a folder on rank 0, in their own memory each; {} elsewhere. A collective."""
    tensors = {}
    for name in names:
        full: torch.Tensor | None = what.others.get(name)
        if spec := what.params.get(name):
            full = gather_full(params, spec, params.stored.get(spec.name))
            full = None if full is None else full.to(dtype_of(spec.dtype))
        # Safetensors stores dense memory only; a view of a gathered value may be strided.
        if full is not None and params.world.rank == 0:
            tensors[name] = full.contiguous()
    return tensors


def on_rank_0(
    params: RankParameters, writer: W | None, act: Callable[[W], None], site: str = "save_pretrained"
) -> None:
    """Let rank 0, which alone has a writer, act; RuntimeFault on all ranks if that fails."""
    error: Exception | None = None
    if writer is not None:
        try:
            act(writer)
        except Exception as caught:
            # The disk is full, or a config cannot be written: the other ranks wait in the gather below.
            error = caught
    failed = f"{type(error).__name__}: {error}" if error else ""
    failed = params.world.everyone().gather_objects(failed, site)[0]
    if failed:
        remedy = "see to the disk, and save again; weights that were saved before are intact"
        raise RuntimeFault(site, f"rank 0 cannot write: {failed}", remedy) from error


class Writer:
    """Writes the folder on rank 0: files under temporary names first, renamed at the end."""

    def __init__(self, folder: Path, count: int) -> None:
        self._folder = folder
        self._count = count
        self._names: list[str] = []

    def begin(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        # Left by a run that was stopped.
        for old in self._folder.glob(f"*{PART}"):
            old.unlink()
        self._names = free_names(self._folder, self._count)

    def write(self, number: int, tensors: dict[str, torch.Tensor]) -> None:
        """Write file `number` under its name with the suffix `.part`."""
        # transformers refuses a file without this entry.
        library().torch.save_file(tensors, self._aside(self._names[number]), metadata={"format": "pt"})

    def finish(self, sizes: Mapping[str, int], files: Sequence[Sequence[str]], how: FolderFormat) -> None:
        """Rename the files, the one that readers look for last; then remove those that are not read any more."""
        # Before the weights: a reader never finds new weights without their config.
        how.write_rest(self._folder)
        old = weight_files(self._folder)
        for name in self._names:
            self._aside(name).replace(self._folder / name)
        if self._count > 1:
            file_of: dict[str, str] = {}
            for file, names in zip(self._names, files, strict=True):
                file_of |= dict.fromkeys(names, file)
            index: dict[str, Any] = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": file_of}
            self._aside(INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
            self._aside(INDEX).replace(self._folder / INDEX)
        kept = set(self._names)
        if self._count > 1:
            kept.add(INDEX)
        # The single file first: while it is there, readers prefer it to the new index.
        for name in sorted(old - kept, key=[SINGLE].__contains__, reverse=True):
            (self._folder / name).unlink()

    def _aside(self, name: str) -> Path:
        return self._folder / (name + PART)


def weight_files(folder: Path) -> set[str]:
    """Return the names of the files that hold a model's weights, and of their index."""
    numbered = {file.name for file in folder.glob("model*-?????-of-?????.safetensors")}
    return numbered | {name for name in (SINGLE, INDEX) if (folder / name).exists()}


def free_names(folder: Path, count: int) -> list[str]:
    """Name `count` files: `model-00001-of-00002.safetensors`, ..., or `model.1-...` if an index may list such files."""
    if count == 1:
        return [SINGLE]
    old, tag = weight_files(folder), 0
    while True:
        stem = f"model.{tag}" if tag else "model"
        names = [f"{stem}-{k + 1:05d}-of-{count:05d}.safetensors" for k in range(count)]
        if not old & set(names):
            return names
        tag += 1


CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
SITE = "save_adapter"


def save_adapter(
    params: RankParameters, what: Contents, folder: Path, write_config: Callable[[Path], None]
) -> None:
    """Write the folder; a collective. On failure raise RuntimeFault on all ranks and keep the old folder."""
    # If the library is missing, it is missing on all ranks: raise before any rank waits in a gather.
    library()
    params.absorb_edits()
    tensors = gather_named(params, what, what.order)
    held = tensors if params.world.rank == 0 else None
    on_rank_0(params, held, lambda tensors: write_folder(folder, tensors, write_config), SITE)


def write_folder(
    folder: Path, tensors: Mapping[str, torch.Tensor], write_config: Callable[[Path], None]
) -> None:
    """Write into a temporary folder, then replace this one, or its files."""
    # Resolve links: renames must stay within one file system.
    folder = folder.resolve()
    aside = folder.with_name(folder.name + PART)
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        write_config(aside)
        library().torch.save_file(dict(tensors), aside / WEIGHTS, metadata={"format": "pt"})
        if not folder.exists():
            aside.rename(folder)
            return
        # No reader finds new weights with an old config, or the reverse: rather none for a moment.
        if settings(folder / CONFIG) != settings(aside / CONFIG):
            (folder / WEIGHTS).unlink(missing_ok=True)
        for name in (CONFIG, WEIGHTS):
            (aside / name).replace(folder / name)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def settings(file: Path) -> Any:
    """Return what a config says; its lists in one order, as PEFT writes sets. None for a file that cannot be read."""
    try:
        found = json.loads(file.read_text())
        return {key: sorted(x, key=str) if isinstance(x, list) else x for key, x in found.items()}
    except (OSError, ValueError, AttributeError):
        return None
