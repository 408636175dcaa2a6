"""`weights=`: a folder of Hugging Face's format, or a checkpoint, as a source of initial values."""

from __future__ import annotations

import os
import reprlib

from autoptd.errors import PlanError
from autoptd.program.sources import Weights
from autoptd.runtime.checkpoint.read import is_checkpoint, open_any
from autoptd.runtime.folders.read_folder import open_folder


def open_weights(path: str | os.PathLike[str]) -> Weights:
    """Open a folder of Hugging Face's format, or a checkpoint; PlanError for anything else."""
    if not isinstance(path, (str, os.PathLike)):
        remedy = "a folder with a model's files, or a checkpoint"
        raise PlanError(f"weights={reprlib.repr(path)}", "is not the path of a folder", remedy)
    return open_any(path) if is_checkpoint(path) else open_folder(path)


__all__ = ["open_weights"]
