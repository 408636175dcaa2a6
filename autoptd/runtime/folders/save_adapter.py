"""Write an adapter folder in PEFT's format: `adapter_config.json` and `adapter_model.safetensors`.

In: the parameters of all ranks, and those to write, with their names in the folder. Out: the folder, complete
or unchanged. Rank 0 writes, and holds the adapter's tensors.

    save_adapter(params, contents, Path("adapter"), write_config)
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from autoptd.runtime.folders.read_folder import library
from autoptd.runtime.folders.save_pretrained import PART, Contents, gather_named, on_rank_0
from autoptd.runtime.params.parameters import RankParameters

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


__all__ = ["CONFIG", "WEIGHTS", "save_adapter", "write_folder"]
