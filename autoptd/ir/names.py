"""The names that emitted files use for their own purposes: no input, argument or variable may take one; names of layers.

An argument of the user's may hide any other builtin (`input`); a variable of ours hides none.
"""

from __future__ import annotations

import builtins
import keyword

from autoptd.ir.mesh import MESH_AXES

USED = frozenset({"self", "w", "b", "i", "F", "torch", "rt", "float", "range", *MESH_AXES, *keyword.kwlist})
RESERVED = frozenset({*USED, *dir(builtins)})
# Methods of a namespace of weights: a module of this name is read as an item.
METHODS = frozenset({"at"})


def free_name(wanted: str) -> str:
    """Return `wanted`, or `wanted_` where a variable must not be called that."""
    return wanted if wanted.isidentifier() and wanted not in RESERVED else f"{wanted}_"


def layer_of(path: str) -> str:
    """Return a module's path up to its first number, else its first name: `transformer.h.3` for all inside that layer."""
    parts = path.split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: i + 1])
    return parts[0]


def is_within(path: str, module: str) -> bool:
    """Tell whether the module at `path` is `module`, or lies within it."""
    return path == module or path.startswith(f"{module}.")
