"""The device mesh: which rank sits where, and which ranks form a group.

Rank order is decided here and nowhere else: tp fastest, then dp, pp slowest (Narayanan et al., SC'21, section 3: tensor
parallel ranks are neighbours, pipeline ranks are far apart).

    Mesh(t=2, p=2, d=2).coordinate(5) == Coordinate(pp=1, dp=0, tp=1)
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

MESH_AXES = ("tp", "dp", "pp")  # fastest first


@dataclass(frozen=True)
class Coordinate:
    """The place of a rank on the mesh."""

    pp: int
    dp: int
    tp: int


@dataclass(frozen=True)
class Mesh:
    """t x p x d ranks: `t` tensor, `p` pipeline and `d` data parallel."""

    t: int = 1
    p: int = 1
    d: int = 1

    @property
    def size(self) -> int:
        return self.t * self.p * self.d

    def degree(self, axis: str) -> int:
        """Number of ranks along one mesh axis ("tp", "dp" or "pp")."""
        return {"tp": self.t, "dp": self.d, "pp": self.p}[axis]

    def coordinate(self, rank: int) -> Coordinate:
        return Coordinate(pp=rank // (self.t * self.d), dp=rank // self.t % self.d, tp=rank % self.t)

    def rank(self, at: Coordinate) -> int:
        return (at.pp * self.d + at.dp) * self.t + at.tp

    def group(self, rank: int, axes: tuple[str, ...]) -> tuple[int, ...]:
        """Ranks that differ from `rank` along `axes` only, in ascending order, `rank` included."""
        at = self.coordinate(rank)
        span = {axis: range(self.degree(axis)) if axis in axes else (getattr(at, axis),) for axis in MESH_AXES}
        places = product(span["pp"], span["dp"], span["tp"])
        return tuple(self.rank(Coordinate(pp, dp, tp)) for pp, dp, tp in places)

    def groups(self, axes: tuple[str, ...]) -> list[tuple[int, ...]]:
        """All groups along `axes`, in a fixed order; together they hold every rank once."""
        return sorted({self.group(rank, axes) for rank in range(self.size)})

    def __str__(self) -> str:
        return f"t={self.t} p={self.p} d={self.d}"
