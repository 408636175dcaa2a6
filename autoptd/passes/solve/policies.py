"""Over which axes values are typed, and how: the batch by rule (`batch.py`), tensor parallelism by price (`assign.py`).

POLICY.axis         # "tp": the axis of the mesh over which the solver chooses a type for every value
"""

from __future__ import annotations

from dataclasses import dataclass

from autoptd.ir.mesh import AXES, Role


@dataclass(frozen=True)
class Policy:
    """How the types over one axis of the mesh are found."""

    axis: str


# The axis whose ranks divide the values within a layer.
POLICY = next(Policy(axis.name) for axis in AXES.values() if axis.role is Role.VALUES)
