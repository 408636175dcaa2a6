"""The values of a model's buffers during compilation, with a record of those that the compiler read.

In: values by name. Out: the same, for passes to read, and a digest of each that was read. A value may have
decided something (a causal mask became `is_causal`, and is not read at run time), so the program stores its
digest and rejects another value that is loaded later. Every read through this mapping is recorded.

    buffers = Buffers(captured.buffers)
    buffers["mask"]                                  # recorded
    buffers.looked_at()                              # (("mask", "3f2a..."),)
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

BLOCK_BYTES = 1 << 26


class Buffers(Mapping[str, torch.Tensor]):
    """A mapping from name to value that records the names whose values were read."""

    def __init__(self, values: Mapping[str, torch.Tensor]) -> None:
        self._values = dict(values)
        self._read: set[str] = set()
        devices = [value.device for value in self._values.values() if not value.is_meta]
        self.device = devices[0] if devices else torch.device("cpu")

    def __getitem__(self, name: str) -> torch.Tensor:
        self._read.add(name)
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def has_value(self, name: str) -> bool:
        """Tell whether a buffer has a value, i.e. is not on meta; this does not count as a read."""
        return not self._values[name].is_meta

    def looked_at(self) -> tuple[tuple[str, str], ...]:
        """Return (name, digest) of every buffer whose value was read."""
        read = [name for name in sorted(self._read) if self.has_value(name)]
        return tuple((name, digest(self._values[name])) for name in read)


@dataclass(frozen=True)
class SharedBuffers:
    """Buffers of a model that share memory: a write to one is a write to the other.

    `twins` are groups of names of one buffer, in the model's order; `overlaps` maps a buffer's name to the
    buffers that partly overlap it.
    """

    twins: tuple[tuple[str, ...], ...] = ()
    overlaps: Mapping[str, str] = field(default_factory=dict)

    def names_of(self, name: str) -> tuple[str, ...]:
        """Return all names of a buffer."""
        return next((names for names in self.twins if name in names), (name,))

    def complete(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the values under all names of their buffers; if several values are given for one buffer, the
        last one wins, as in torch.
        """
        complete = dict(values)
        for names in self.twins:
            given = [name for name in names if name in values]
            if given:
                complete |= dict.fromkeys(names, values[given[-1]])
        return complete


def same_entries(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Tell whether two tensors have equal entries, also in dtypes that torch cannot compare (float8, by its
    bits).
    """
    if one.dtype.itemsize > 1 or not one.is_floating_point():
        return torch.equal(one, other)
    is_alike = one.shape == other.shape and one.dtype == other.dtype
    return is_alike and torch.equal(bytes_of(one), bytes_of(other))


def bytes_of(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes [n], in the order of its entries: shared with it where they are next to each other."""
    flat = x.detach().resolve_conj().resolve_neg().reshape(-1)
    # A column, or a single entry, of a larger tensor keeps its stride, even where torch calls it contiguous.
    if flat.stride() != (1,):
        flat = torch.empty(flat.shape, dtype=flat.dtype, device=flat.device).copy_(flat)
    return flat.view(torch.uint8)


def digest(x: torch.Tensor) -> str:
    """Return a hash of a tensor's shape, dtype and entries."""
    state = hashlib.sha256(f"{tuple(x.shape)} {x.dtype}".encode())
    # As bytes, so that NaN and -0.0 compare by their bits.
    for block in bytes_of(x).split(BLOCK_BYTES):
        state.update(block.cpu().numpy().data)
    return state.hexdigest()[:16]
