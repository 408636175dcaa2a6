"""Read parts of a checkpoint's tensors: the bytes that are needed, straight to where they go, and each block checked.

In: a folder, and rectangles of its tensors with the tensors to fill. Out: filled tensors. Nothing is unpickled.

    checkpoint = open_checkpoint("ckpts/step-00001000")
    checkpoint.reader().fill([Want("model.lm_head.weight", (32, 0), (16, 768), x)])        # rows 32 to 48
    autoptd.parallelize(model, t=8, weights=checkpoint.path)                               # it is a `Source`, too

Where a rank needs some columns, their bytes lie apart: they are read together with what is between them, unless that is much.
A file has a CRC32 for each MiB, so that whole blocks are read; one that was changed is a RuntimeFault.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from autoptd.errors import PlanError, RuntimeFault
from autoptd.ir.rectangles import Sizes
from autoptd.runtime.checkpoint.commit import find
from autoptd.runtime.checkpoint.manifest import (
    MODEL,
    Chunk,
    Manifest,
    TensorRecord,
    check_files,
    fqn,
    read_checked,
    read_manifest,
)
from autoptd.runtime.checkpoint.write import crc_file
from autoptd.runtime.folders.disk import BLOCK_BYTES
from autoptd.runtime.params.parts import dtype_of

# Bytes that are read at once, and between two parts that are read together.
MOST_BYTES, GAP_BYTES = 4 << 20, 64 << 10
SCRATCH_BYTES = MOST_BYTES + 2 * BLOCK_BYTES


class Want(NamedTuple):
    """A rectangle of tensor `fqn` of a checkpoint, from `offsets` on, and the tensor of its `sizes` to fill."""

    fqn: str
    offsets: Sizes
    sizes: Sizes
    into: torch.Tensor


class Tile(NamedTuple):
    """Bytes `start` to `end` of a file, and what to copy from them: elements as far apart as `strides` say."""

    file: str
    start: int
    end: int
    strides: Sizes
    dtype: torch.dtype
    into: torch.Tensor
    fqn: str


@dataclass(frozen=True)
class Entry:
    """What is known of a tensor without reading it."""

    shape: Sizes
    dtype: torch.dtype | None


@dataclass(frozen=True)
class Checkpoint:
    """A folder that was committed, and its manifest; a `Source` of the parameters' values."""

    path: Path
    manifest: Manifest
    names: Mapping[str, str]

    @property
    def entries(self) -> dict[str, Entry]:
        """The parameters and buffers, under all their names."""
        return {name: entry_of(self.manifest.tensors[fqn]) for name, fqn in self.names.items()}

    def reader(self) -> Reader:
        return Reader(self)

    def renamed(self, names: Mapping[str, str]) -> Checkpoint:
        """Return the same parameters and buffers under other names, given as old name -> new name."""
        return replace(self, names={names.get(name, name): fqn for name, fqn in self.names.items()})

    def only(self, names: Iterable[str]) -> Checkpoint:
        """Return those of the parameters and buffers that have one of these names."""
        return replace(self, names={name: self.names[name] for name in names if name in self.names})

    def named(self, tied: Iterable[Sequence[str]]) -> Checkpoint:
        """Return the checkpoint under the first ones of a model's names: others may have chosen another one."""
        tensors, names = dict(self.manifest.tensors), dict(self.names)
        renamed: dict[str, str] = {}
        for first, *others in tied:
            known = next((name for name in (first, *others) if name in names), None)
            if known is not None:
                tensors[MODEL + first] = tensors[names[known]]
                # Copies under other names are not read.
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
        """Return a hash that differs where the files do."""
        return f"{zlib.crc32(self.manifest.text()):08x}"

    def parts(self) -> dict[str, str]:
        return {"checkpoint.json": self.fingerprint()}

    def difference(self, names: list[str]) -> tuple[str, str]:
        return (
            f"found another checkpoint in {str(self.path)!r} than rank 0",
            "give every node the same folder",
        )


def renamed_groups(groups: Iterable[Mapping[str, Any]], names: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the groups of an optimizer with other names of some parameters, each once."""
    found = []
    for group in groups:
        params = dict.fromkeys(names.get(name, name) for name in group["params"])
        found.append({**group, "params": list(params)})
    return found


def entry_of(record: TensorRecord) -> Entry:
    return Entry(record.shape, getattr(torch, record.dtype, None))


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Read the manifest of a checkpoint, and check that its files are there; PlanError where they are not."""
    folder = find(Path(path))
    manifest = read_manifest(folder)
    check_files(folder, manifest)
    names = {fqn.removeprefix(MODEL): fqn for fqn in manifest.tensors if fqn.startswith(MODEL)}
    for first, tied in manifest.about.get("names", {}).items():
        names |= dict.fromkeys(tied, MODEL + first)
    return Checkpoint(folder, manifest, names)


class Reader:
    """Reads for one rank; `nbytes` counts what it read. Not thread-safe."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._tensors = checkpoint.manifest.tensors
        self.nbytes = 0
        self._crcs: dict[str, memoryview] = {}
        # Blocks that were read last: the file, the first byte there, and how many bytes of `_scratch` they are.
        self._last = ("", 0, 0)
        # Kept for all that is read: memory of many sizes that is freed again is not all given back.
        self._scratch = bytearray(0)

    def fill(self, wants: Iterable[Want]) -> None:
        """Fill the tensors of `wants`; RuntimeFault where a block was changed, or a file cannot be read."""
        found = [tile for want in wants for tile in self._tiles(want)]
        descriptors: dict[str, int] = {}
        try:
            for tile in sorted(found, key=lambda tile: (tile.file, tile.start)):
                if tile.file not in descriptors:
                    path = self._checkpoint.path / tile.file
                    descriptors[tile.file] = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
                self._copy(tile, self._bytes(descriptors[tile.file], tile))
        except OSError as error:
            raise RuntimeFault(str(self._checkpoint.path), f"cannot be read: {error}", REMEDY) from error
        finally:
            self._last = ("", 0, 0)
            self._scratch = bytearray(0)
            for descriptor in descriptors.values():
                os.close(descriptor)

    def has(self, name: str) -> bool:
        return name in self._checkpoint.names

    def whole(self, name: str) -> torch.Tensor:
        """Return a parameter or buffer, in memory of its own."""
        return self.tensor(self._checkpoint.names[name])

    def tensor(self, fqn: str) -> torch.Tensor:
        """Return a tensor by its name in the checkpoint."""
        record = self._tensors[fqn]
        x = torch.empty(record.shape, dtype=dtype_of(record.dtype), device="cpu")
        self.fill([Want(fqn, (0,) * len(record.shape), record.shape, x)])
        return x

    def rows(self, name: str, dim: int, rows: torch.Tensor) -> torch.Tensor:
        """Read the entries `rows` along `dim`, counted from 1, in this order; a 0 stands for zeros (padding)."""
        fqn = self._checkpoint.names[name]
        record = self._tensors[fqn]
        shape = (*record.shape[:dim], len(rows), *record.shape[dim + 1 :])
        x = torch.zeros(shape, dtype=dtype_of(record.dtype), device="cpu")
        wants, at = [], 0
        for first, count in runs_of(rows.tolist()):
            part = x.narrow(dim, at, count)
            offsets = [0] * len(shape)
            offsets[dim] = first - 1
            if first:
                wants.append(Want(fqn, tuple(offsets), tuple(part.shape), part))
            at += count
        self.fill(wants)
        return x

    def _tiles(self, want: Want) -> Iterator[Tile]:
        record = self._tensors[want.fqn]
        dtype = dtype_of(record.dtype)
        for chunk in record.chunks:
            found = common(chunk, want)
            if found is None:
                continue
            begin, sizes = found
            into = want.into
            for dim, size in enumerate(sizes):
                into = into.narrow(dim, begin[dim] - want.offsets[dim], size)
            yield from tiles_of(want.fqn, chunk, begin, into, dtype)

    def _bytes(self, descriptor: int, tile: Tile) -> memoryview:
        """Return the bytes of a tile, from blocks that were checked."""
        first = tile.start // BLOCK_BYTES * BLOCK_BYTES
        size: int = self._checkpoint.manifest.files[tile.file]["bytes"]
        end = min(-(-tile.end // BLOCK_BYTES) * BLOCK_BYTES, size)
        file, begin, count = self._last
        if len(self._scratch) < end - first:
            self._scratch, count = bytearray(max(end - first, SCRATCH_BYTES)), 0
        known = memoryview(self._scratch)
        # Tiles come in the order of the file: the next one may begin in a block that was read for the last one.
        kept = begin + count - first if file == tile.file and begin <= first < begin + count else 0
        if first + kept < end:
            known[:kept] = known[first - begin : first - begin + kept]
            self._read(descriptor, tile, first + kept, known[kept : end - first])
            begin = first
            self._last = (tile.file, begin, end - first)
        return known[tile.start - begin : tile.end - begin]

    @torch.no_grad()
    def _copy(self, tile: Tile, data: memoryview) -> None:
        """Copy the elements of a tile to where they go."""
        raw = torch.frombuffer(data, dtype=torch.uint8)
        # Where it is not as we write it, elements may begin at any byte, and those of a tensor may not.
        if raw.data_ptr() % tile.dtype.itemsize:
            raw = raw.clone()
        tile.into.copy_(raw.view(tile.dtype).as_strided(tile.into.shape, tile.strides))

    def _read(self, descriptor: int, tile: Tile, start: int, into: memoryview) -> None:
        """Read blocks from byte `start` on, and check them."""
        done = 0
        while done < len(into):
            count = os.preadv(descriptor, [into[done:]], start + done)
            if not count:
                raise RuntimeFault(tile.file, f"ends at byte {start + done}, in {tile.fqn}", REMEDY)
            done += count
        self.nbytes += done
        crcs = self._crcs_of(tile.file)
        for at in range(0, len(into), BLOCK_BYTES):
            if zlib.crc32(into[at : at + BLOCK_BYTES]) != crcs[(start + at) // BLOCK_BYTES]:
                where = f"{self._checkpoint.path / tile.file}"
                fact = f"was changed after it was written: block {(start + at) // BLOCK_BYTES}, read for {tile.fqn}"
                raise RuntimeFault(where, fact, REMEDY)

    def _crcs_of(self, file: str) -> memoryview:
        if file not in self._crcs:
            data = read_checked(self._checkpoint.path, self._checkpoint.manifest, crc_file(file))
            self._crcs[file] = memoryview(data).cast("I")
        return self._crcs[file]


REMEDY = "load the checkpoint before it"


def common(chunk: Chunk, want: Want) -> tuple[Sizes, Sizes] | None:
    """Return (offsets, sizes) of what a chunk has of a wanted rectangle; None where that is nothing."""
    begin = tuple(map(max, chunk.offsets, want.offsets))
    end = tuple(map(min, ends_of(chunk.offsets, chunk.sizes), ends_of(want.offsets, want.sizes)))
    sizes = tuple(stop - first for first, stop in zip(begin, end, strict=True))
    return (begin, sizes) if min(sizes, default=1) > 0 else None


def ends_of(offsets: Sizes, sizes: Sizes) -> Sizes:
    return tuple(start + size for start, size in zip(offsets, sizes, strict=True))


def runs_of(rows: list[int]) -> Iterator[tuple[int, int]]:
    """Yield (first, count) of runs of consecutive numbers, and (0, count) of zeros, in order."""
    start = 0
    for i in range(1, len(rows) + 1):
        step = 1 if rows[start] else 0
        if i == len(rows) or rows[i] - rows[i - 1] != step:
            yield rows[start], i - start
            start = i


def tiles_of(fqn: str, chunk: Chunk, begin: Sizes, into: torch.Tensor, dtype: torch.dtype) -> Iterator[Tile]:
    """Yield what to read of a chunk to fill `into`, whose first element is at `begin` in the full tensor.

    A tile has at most `MOST_BYTES`, and no gap of more than `GAP_BYTES` between the elements that are needed.
    """
    strides, step = [], 1
    for size in reversed(chunk.sizes):
        strides.append(step)
        step *= size
    strides.reverse()
    places = (start - own for start, own in zip(begin, chunk.offsets, strict=True))
    first = sum(place * stride for place, stride in zip(places, strides, strict=True))
    yield from _split(fqn, chunk.file, chunk.at + first * dtype.itemsize, tuple(strides), into, dtype)


def _split(
    fqn: str, file: str, start: int, strides: Sizes, into: torch.Tensor, dtype: torch.dtype
) -> Iterator[Tile]:
    wide = [dim for dim, size in enumerate(into.shape) if size > 1]
    span = 1 + sum((into.shape[dim] - 1) * strides[dim] for dim in wide)
    inner = 1
    gap = 0
    for dim in reversed(wide):
        gap = max(gap, strides[dim] - inner)
        inner += (into.shape[dim] - 1) * strides[dim]
    if span * dtype.itemsize <= MOST_BYTES and gap * dtype.itemsize <= GAP_BYTES:
        yield Tile(file, start, start + span * dtype.itemsize, strides, dtype, into, fqn)
        return
    # Rows of the outermost dim: as many as fit, or one by one where the gap is between them or within.
    dim = wide[0]
    width = strides[dim] * dtype.itemsize
    count = max(1, MOST_BYTES // width) if gap * dtype.itemsize <= GAP_BYTES else 1
    for row in range(0, into.shape[dim], count):
        part = into.narrow(dim, row, min(count, into.shape[dim] - row))
        yield from _split(fqn, file, start + row * width, strides, part, dtype)


def verify_files(checkpoint: Checkpoint) -> list[str]:
    """Read all files of a checkpoint, and describe what was changed; nothing if all is as it was written."""
    findings = []
    for file, record in checkpoint.manifest.files.items():
        try:
            if "crc32" in record:
                read_checked(checkpoint.path, checkpoint.manifest, file)
            else:
                findings += _changed_blocks(checkpoint, file)
        except (PlanError, OSError) as error:
            findings.append(str(error))
    return findings


def _changed_blocks(checkpoint: Checkpoint, file: str) -> list[str]:
    crcs = memoryview(read_checked(checkpoint.path, checkpoint.manifest, crc_file(file))).cast("I")
    findings = []
    with (checkpoint.path / file).open("rb") as opened:
        for block, crc in enumerate(crcs):
            if zlib.crc32(opened.read(BLOCK_BYTES)) != crc:
                start = block * BLOCK_BYTES
                names = names_in(checkpoint.manifest, file, start, start + BLOCK_BYTES)
                where = f", with {', '.join(names[:3])}" if names else ""
                findings.append(f"{file}: block {block} was changed{where}")
    return findings


def names_in(manifest: Manifest, file: str, start: int, end: int) -> list[str]:
    """Return the tensors that have elements in bytes `start` to `end` of a file."""
    found: dict[str, None] = {}
    for name, record in manifest.tensors.items():
        for chunk in record.chunks:
            nbytes = math.prod(chunk.sizes) * dtype_of(record.dtype).itemsize
            if chunk.file == file and chunk.at < end and chunk.at + nbytes > start:
                found[name] = None
    return list(found)


__all__ = ["Checkpoint", "Entry", "Reader", "Want", "open_checkpoint", "verify_files"]
