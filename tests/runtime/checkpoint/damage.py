"""Change a checkpoint on the disk, unnoticed by its checksums."""

from __future__ import annotations

import json
import pickle
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any


def edit(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the manifest, with a CRC32 that fits."""
    path = folder / "checkpoint.json"
    record = json.loads(path.read_text())
    del record["crc32"]
    change(record)
    body = json.dumps(record)[1:] + "\n"
    path.write_text(f'{{"crc32": {zlib.crc32(body.encode())},\n{body}')


def edit_metadata(folder: Path, change: Callable[[Any], None]) -> None:
    """Change `.metadata`, with a CRC32 that fits where there is a manifest."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    write_metadata(folder, pickle.dumps(metadata))


def write_metadata(folder: Path, data: bytes) -> None:
    (folder / ".metadata").write_bytes(data)
    entry = {"bytes": len(data), "crc32": zlib.crc32(data)}
    if (folder / "checkpoint.json").exists():
        edit(folder, lambda record: record["files"].update({".metadata": entry}))
