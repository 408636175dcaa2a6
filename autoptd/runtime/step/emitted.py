"""Execute an emitted file: its text becomes a module, whose lines tracebacks and pdb show, and the one class in it."""

from __future__ import annotations

import linecache
import types
from pathlib import Path
from typing import TypeVar

from autoptd.errors import InternalError

Emitted = TypeVar("Emitted")


def execute(source: str, filename: str, base: type[Emitted]) -> tuple[types.ModuleType, type[Emitted]]:
    """Execute an emitted file; return its module, and the one class derived from `base` that it defines."""
    if not Path(filename).is_file():
        # Tracebacks and pdb read lines from here.
        linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    module = types.ModuleType(Path(filename).stem)
    module.__file__ = filename
    # No import: a process may hold two programs whose files have the same names.
    exec(compile(source, filename, "exec"), module.__dict__)
    derived = [
        value for value in vars(module).values() if isinstance(value, type) and issubclass(value, base)
    ]
    own = [value for value in derived if value is not base]
    if len(own) != 1:
        names = [value.__name__ for value in own]
        raise InternalError(
            filename, f"defines {names} where one class derived from {base.__name__} is expected"
        )
    return module, own[0]


__all__ = ["execute"]
