"""Compute an additive 64-bit fingerprint: those of shards, along any dim, add up to that of the whole tensor.

In: a tensor, its name, and where its rows and columns lie in the whole. Out: the sum over elements of
mix(bits, name, row, column) modulo 2**64, as an int64 (0-d). Row is the index in dim 0, column the flat index in all
other dims.

    whole = fingerprint(x, "head.weight")
    some, others = torch.arange(3), torch.arange(3, 8)
    parts = [fingerprint(x[:3], "head.weight", rows=some), fingerprint(x[3:], "head.weight", rows=others)]
    assert sum(parts) == whole            # int64 wraps around

It detects flipped bits, another sign of zero, and permuted rows or elements; it does not resist an adversary.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

import torch

from autoptd.ir.layout import copy_axes
from autoptd.program.specs import ParamSpec
from autoptd.runtime.params.guard import unguarded
from autoptd.runtime.params.parameters import RankParameters
from autoptd.runtime.params.parts import dtype_of, own_entries

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Elements at a time: on the CPU so few that intermediate values stay in the cache, elsewhere so few that they fit.
CPU_CHUNK_ELEMENTS = 1 << 16
CHUNK_ELEMENTS = 1 << 24
# Offsets of up to this number of rows or columns are cached for the next tensor: 512 times 16 kB at most.
MOST_KEPT = 2048
# The multipliers of splitmix64: odd, so that multiplication is a bijection, and without a pattern in their bits.
GOLDEN, SILVER = -0x61C8864680B583EB, -0x40A7B892E31B1A47


@torch.no_grad()
def fingerprint(
    x: torch.Tensor, name: str, rows: torch.Tensor | None = None, columns: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the fingerprint of `x`, whose rows and columns have the indices `rows` and `columns` in the whole.

    These default to 0, 1, ...; entries with a negative row or column are padding, and are not counted.
    """
    x = x.detach()
    if not x.numel():
        return torch.zeros((), dtype=torch.int64, device=x.device)
    if x.is_complex():
        x = torch.view_as_real(x)
    count = x.shape[0] if x.dim() else 1
    x = x.reshape(count, x.numel() // max(1, count)).contiguous()
    bits = x.view(BITS[x.element_size()])
    # mix(bits, name, row, column) = fold((bits + offset[row]) * factor[column]), where fold(y) = y ^ (y >> 32).
    if rows is None:
        offset = _of_all(_offset, count, x.device, name)
    else:
        rows = rows.to(x.device)
        if bool((rows < 0).any()):
            bits, rows = bits[rows >= 0], rows[rows >= 0]
        offset = _offset(rows, name)
    if columns is None:
        factor = _of_all(_factor, x.shape[1], x.device)
    else:
        columns = columns.to(x.device)
        # A complex tensor has two numbers in each column.
        numbers = x.shape[1] // max(1, len(columns))
        if numbers > 1:
            columns = (columns[:, None] * numbers + torch.arange(numbers, device=x.device)).flatten()
        if bool((columns < 0).any()):
            bits, columns = bits[:, columns >= 0], columns[columns >= 0]
        factor = _factor(columns)
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    chunk = CPU_CHUNK_ELEMENTS if x.device.type == "cpu" else CHUNK_ELEMENTS
    height = max(1, chunk // max(1, bits.shape[1]))
    mixed, folded = (
        torch.empty(min(bits.numel(), chunk), dtype=torch.int64, device=x.device) for _ in range(2)
    )
    for some_rows, offsets in zip(bits.split(height), offset.split(height), strict=True):
        for part, factors in zip(some_rows.split(chunk, 1), factor.split(chunk), strict=True):
            mix, fold = (buffer[: part.numel()].view(part.shape) for buffer in (mixed, folded))
            # Widened first: torch is ten times slower on operands of two dtypes.
            mix.copy_(part).add_(offsets).mul_(factors)
            total += mix.bitwise_xor_(torch.bitwise_right_shift(mix, 32, out=fold)).sum()
    return total


def fingerprint_of(params: RankParameters, spec: ParamSpec, part: torch.Tensor | None = None) -> torch.Tensor:
    """Return the fingerprint of this rank's part of a parameter; those of all parts add up to that of the whole.

    `part` is a tensor of the same layout, by default the one that stages use.
    """
    # Entries are owned as 1, 2, ... because `own_entries` fills up padding with 0: after the subtraction, padding is -1.
    x = params.local[spec.name] if part is None else part
    if not spec.shard:
        return fingerprint(x, spec.name)
    numbers = torch.arange(1, spec.shape[spec.cut_dim] + 1, device="cpu")
    entries = own_entries(spec, numbers, 0, params.world) - 1
    if spec.cut_dim == 0:
        return fingerprint(x, spec.name, rows=entries)
    # The cut dim is one of those that make up the column: take this rank's columns of the whole, -1 for padding.
    sizes = spec.shape[1:]
    whole_columns = torch.arange(math.prod(sizes), device="cpu").view(sizes)
    columns = whole_columns.index_select(spec.cut_dim - 1, entries.clamp(min=0))
    width = [-1 if dim == spec.cut_dim - 1 else 1 for dim in range(len(sizes))]
    return fingerprint(x, spec.name, columns=columns.where(entries.view(width) >= 0, -1).flatten())


def fingerprint_of_rectangle(x: torch.Tensor, name: str, shape: Sequence[int], offsets: Sequence[int]) -> int:
    """Return the fingerprint of a rectangle of a tensor of `shape`, which begins at `offsets`."""
    if not shape:
        return int(fingerprint(x, name))
    rows = torch.arange(offsets[0], offsets[0] + x.shape[0], device="cpu")
    columns = torch.zeros(1, dtype=torch.int64, device="cpu")
    for size, first, count in zip(shape[1:], offsets[1:], x.shape[1:], strict=True):
        columns = (columns[:, None] * size + torch.arange(first, first + count, device="cpu")).flatten()
    return int(fingerprint(x, name, rows, columns))


@unguarded()
def fingerprint_of_model(params: RankParameters) -> str:
    """Return the fingerprint of all stored parameters: the same on every mesh; a collective of all ranks."""
    world = params.world
    total = torch.zeros((), dtype=torch.int64, device=world.device)
    params.wait()
    params.absorb_edits()
    for spec in params.specs:
        if not params.is_first_owner(spec):
            continue
        # Of what replicas share the storage of, all of them get all.
        part = params.local_of(spec.name, params.stored.get(spec.name), dtype_of(spec.storage.dtype))
        copied = copy_axes(spec.use.layout, world.mesh)
        if world.leads(world.mesh.batch_axes) and all(world.group((axis,)).index == 0 for axis in copied):
            total += fingerprint_of(params, spec, part)
    return text_of(world.everyone().all_reduce(total, "fingerprint"))


def fingerprint_of_values(values: Mapping[str, torch.Tensor]) -> str:
    """Return the fingerprint of full tensors: of `dict(model.named_parameters())`, that of the model on any mesh."""
    total = torch.zeros((), dtype=torch.int64, device="cpu")
    for name, x in values.items():
        total += fingerprint(x, name).cpu()
    return text_of(total)


def text_of(total: torch.Tensor | int) -> str:
    """Return a fingerprint as 16 hexadecimal digits."""
    return f"{int(total) % (1 << 64):016x}"


def hash_words(x: torch.Tensor, most: int = 1 << 16) -> torch.Tensor:
    """Hash at most `most` values of a tensor, evenly spread: cheap enough for the inputs of every step."""
    flat = x.detach().reshape(-1)
    if flat.dtype == torch.bool:
        flat = flat.to(torch.int8)
    if flat.numel() > most:
        flat = flat[torch.linspace(0, flat.numel() - 1, most, device=flat.device, dtype=torch.float64).long()]
    return fingerprint(flat.view(1, -1), "")


def _offset(rows: torch.Tensor, name: str) -> torch.Tensor:
    """Return the offsets that are added to the bits of every row, [row, 1]."""
    return _stir(rows * GOLDEN + _key(name))[:, None]


def _factor(columns: torch.Tensor) -> torch.Tensor:
    """Return what the bits of every column are multiplied with, [column]."""
    return _stir(columns * SILVER + 1) | 1


def _of_all(make: Callable[..., torch.Tensor], count: int, device: torch.device, *name: str) -> torch.Tensor:
    """Return what `make` gives for 0, 1, ...; kept where it takes longer than all else of a small tensor."""
    # A device's streams would have to wait for each other.
    if count <= MOST_KEPT and device.type == "cpu":
        return _kept(make, count, device, *name)
    return make(torch.arange(count, device=device), *name)


@lru_cache(maxsize=512)
def _kept(make: Callable[..., torch.Tensor], count: int, device: torch.device, *name: str) -> torch.Tensor:
    # Whatever mode the first caller is in, others may not be.
    with torch.inference_mode(mode=False):
        return make(torch.arange(count, device=device), *name)


def _stir(x: torch.Tensor) -> torch.Tensor:
    """Spread every bit of 64-bit integers over all bits: multiply, and fold the high bits into the low ones."""
    for factor in (GOLDEN, SILVER):
        x = (x ^ (x >> 29)) * factor
    return x ^ (x >> 32)


def _key(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little", signed=True)
