"""Execute an emitted file: its text becomes a module, whose lines tracebacks and pdb show."""

from __future__ import annotations

import linecache
import types
from pathlib import Path


def execute(source: str, filename: str) -> types.ModuleType:
    """Execute an emitted file; return its module."""
    if not Path(filename).is_file():
        # Tracebacks and pdb read lines from here.
        linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    module = types.ModuleType(Path(filename).stem)
    module.__file__ = filename
    # No import: a process may hold two programs whose files have the same names.
    exec(compile(source, filename, "exec"), module.__dict__)
    return module


__all__ = ["execute"]
