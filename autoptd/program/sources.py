"""Where a rank's initial values come from, other than from rank 0: a source of tensors by name.

In: names. Out: whole tensors, or some rows of them, so that no rank needs to hold what it does not own. A folder of
Hugging Face's format is one (runtime/folders/read_folder.py).

    source.entries["lm_head.weight"].shape                        # (128256, 4096): nothing was read
    source.reader().rows("lm_head.weight", dim=0, rows=rows)      # these rows, in this order

Every rank asks the source on its own: before that, ranks compare `fingerprint()`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

import torch


class TensorEntry(Protocol):
    """What is known of a tensor without reading it. `dtype` is None for one that torch does not have."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype | None: ...


class Reader(Protocol):
    """Gives out the tensors of a source, to one rank; not thread-safe."""

    def has(self, name: str) -> bool: ...

    def whole(self, name: str) -> torch.Tensor:
        """Return a tensor, in memory of its own."""
        ...

    def rows(self, name: str, dim: int, rows: torch.Tensor) -> torch.Tensor:
        """Return the entries `rows` along `dim`, counted from 1, in this order; a 0 stands for zeros (padding)."""
        ...


class Source(Protocol):
    """Tensors by the names that the model has for them."""

    @property
    def entries(self) -> Mapping[str, TensorEntry]: ...

    def reader(self) -> Reader:
        """Return a reader of its own for one rank."""
        ...

    def fingerprint(self) -> str:
        """Return a hash of what the values depend on: ranks whose sources differ have different ones."""
        ...

    def parts(self) -> Mapping[str, str]:
        """Return hashes of what the fingerprint is made of, by name: asked for where fingerprints differ."""
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
        """Return those of the tensors that have one of these names."""
        ...


__all__ = ["Reader", "Source", "TensorEntry", "Weights"]
