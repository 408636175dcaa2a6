"""Define sources of a rank's initial values other than rank 0: tensors by name.

In: names. Out: whole tensors, or some of their rows, so that a rank need not hold values that it does not
own. A folder in Hugging Face's format is a source (runtime/folders/read_folder.py).

    source.entries["lm_head.weight"].shape                        # (128256, 4096): nothing was read
    source.reader().rows("lm_head.weight", dim=0, rows=rows)      # these rows, in this order

Every rank reads the source independently, after all ranks have compared `fingerprint()`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from autoptd.program.specs import ParamSpec

__all__ = ["FolderFormat", "Reader", "Source", "TensorEntry", "Weights"]


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


def write_nothing(folder: Path) -> None:
    """Write nothing next to the weights: the model has no config."""


@dataclass(frozen=True)
class FolderFormat:
    """How a model's folder differs from its state dict.

    `left_out` are tied names that it omits: by the reader's rule, or (None) all but the first of each
    parameter. `names` maps the model's names to the folder's, `write_rest` writes the other files, and
    `remarks` are notes about them for the user.
    """

    left_out: frozenset[str] | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    write_rest: Callable[[Path], None] = write_nothing
    remarks: tuple[str, ...] = ()

    def kept_names(self, spec: ParamSpec) -> list[str]:
        """Return the names under which a parameter is written."""
        if self.left_out is None:
            return [spec.name]
        return [name for name in spec.aliases if name not in self.left_out] or [spec.name]
