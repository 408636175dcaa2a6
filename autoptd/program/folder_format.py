"""Describe, for writers, how a folder in Hugging Face's format differs from the state dict of its model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from autoptd.program.specs import ParamSpec


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


__all__ = ["FolderFormat"]
