"""The values of a model's buffers while it is compiled, and which of them the compiler has looked at.

In: values by name. Out: the same, for passes to read: whatever was read may have decided something (a mask that is causal is
not read any more when the program runs), so the program remembers it, and another value that is loaded later does not pass.
There is no way to read a value here that is not remembered.

    buffers = Buffers(captured.buffers)
    buffers["mask"]                                  # remembered
    buffers.looked_at()                              # (("mask", "3f2a..."),)
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

BLOCK = 1 << 26  # bytes that are hashed at a time


class Buffers(Mapping[str, torch.Tensor]):
    """A mapping of name to value that remembers the names whose values were read."""

    def __init__(self, values: Mapping[str, torch.Tensor]) -> None:
        self._values = dict(values)
        self._read: set[str] = set()
        devices = [one.device for one in self._values.values() if not one.is_meta]
        self.device = devices[0] if devices else torch.device("cpu")

    def __getitem__(self, name: str) -> torch.Tensor:
        self._read.add(name)
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def has_value(self, name: str) -> bool:
        """Whether it is not on meta; says nothing about the value."""
        return not self._values[name].is_meta

    def looked_at(self) -> tuple[tuple[str, str], ...]:
        """(name, digest) of every buffer whose value was read."""
        return tuple(
            (name, digest(self._values[name])) for name in sorted(self._read) if self.has_value(name)
        )


@dataclass(frozen=True)
class SharedBuffers:
    """Buffers of a model that live in the same memory as something else: what is written to one is written to the other.

    `twins`: groups of names of one buffer, in the model's order. `overlaps`: a buffer's name -> what lies over a part of it.
    """

    twins: tuple[tuple[str, ...], ...] = ()
    overlaps: Mapping[str, str] = field(default_factory=dict)

    def complete(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Values under all names of their buffers; of several for one, the last stays, as in torch."""
        found = dict(values)
        for names in self.twins:
            given = [name for name in names if name in values]
            found |= {name: values[given[-1]] for name in names if given}
        return found


def digest(x: torch.Tensor) -> str:
    """Hash of a tensor's shape, dtype and entries."""
    found = hashlib.sha256(f"{tuple(x.shape)} {x.dtype}".encode())
    flat = x.detach().contiguous().reshape(-1).view(torch.uint8)
    for block in flat.split(BLOCK):
        found.update(block.cpu().numpy().data)
    return found.hexdigest()[:16]


__all__ = ["Buffers", "SharedBuffers", "digest"]
