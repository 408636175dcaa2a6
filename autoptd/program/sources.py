"""Define sources of a rank's initial values other than rank 0: tensors by name.

In: names. Out: whole tensors, or some of their rows, so that a rank need not hold values that it does not
own. A folder in Hugging Face's format is a source (runtime/folders/read_folder.py).

    source.entries["lm_head.weight"].shape                        # (128256, 4096): nothing was read
    source.reader().rows("lm_head.weight", dim=0, rows=rows)      # these rows, in this order

Every rank reads the source independently, after all ranks have compared `fingerprint()`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

import torch


class TensorEntry(Protocol):
    """The metadata of a tensor, available without reading it; `dtype` is None if torch does not have it."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype | None: ...


class Reader(Protocol):
    """Read the tensors of a source on one rank; not thread-safe."""

    def has(self, name: str) -> bool: ...

    def whole(self, name: str) -> torch.Tensor:
        """Return a tensor in newly allocated memory."""
        ...

    def rows(self, name: str, dim: int, rows: torch.Tensor) -> torch.Tensor:
        """Return the entries `rows` along `dim`, counted from 1, in this order; 0 stands for padding zeros."""
        ...


class Source(Protocol):
    """Tensors by their names in the model."""

    @property
    def entries(self) -> Mapping[str, TensorEntry]: ...

    def reader(self) -> Reader:
        """Return a separate reader for one rank."""
        ...

    def fingerprint(self) -> str:
        """Return a hash of everything that the values depend on, which differs between different sources."""
        ...

    def parts(self) -> Mapping[str, str]:
        """Return hashes of the parts of the fingerprint, by name; called if fingerprints differ."""
        ...

    def difference(self, names: list[str]) -> tuple[str, str]:
        """Return (fact, remedy) for ranks where the parts `names` differ; the fact follows "rank 1, 3 "."""
        ...


class Weights(Source, Protocol):
    """A source in files, whose names may not be the model's yet."""

    @property
    def path(self) -> Path: ...

    def renamed(self, names: Mapping[str, str]) -> Weights:
        """Return the same tensors under other names, given as old name -> new name."""
        ...

    def only(self, names: Iterable[str]) -> Weights:
        """Return the tensors with these names."""
        ...


__all__ = ["Reader", "Source", "TensorEntry", "Weights"]
