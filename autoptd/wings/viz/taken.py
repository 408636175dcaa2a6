"""Find room for small things on a picture: what is covered already, and the points of a link that may be tried.

In: places, and the cubic curves of a link. Out: whether a place is free; points, a few pixels apart.

    taken = Taken()
    taken.add(Place(10, 10, 20, 20))
    taken.find(Place(15, 15, 4, 4))     # Place(10, 10, 20, 20)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import ceil, floor, hypot

from autoptd.wings.viz.layout import Place, Point

# Pixels of a cell, about as high as a box; pixels between points of a curve.
CELL, STEP = 64.0, 3.0


class Taken:
    """The places that are covered, by the cells of a grid: a picture of all layers has thousands."""

    def __init__(self) -> None:
        self.cells: dict[tuple[int, int], list[Place]] = {}

    def add(self, place: Place) -> None:
        """Cover a place."""
        for cell in _cells(place):
            self.cells.setdefault(cell, []).append(place)

    def find(self, spot: Place) -> Place | None:
        """Return a covered place that reaches into another, None where it is free."""
        for cell in _cells(spot):
            for place in self.cells.get(cell, ()):
                if _overlap(spot, place):
                    return place
        return None


def _cells(place: Place) -> Iterator[tuple[int, int]]:
    columns = range(floor(place.left / CELL), floor(place.right / CELL) + 1)
    rows = range(floor(place.top / CELL), floor(place.bottom / CELL) + 1)
    return product(columns, rows)


def _overlap(a: Place, b: Place) -> bool:
    is_wide = abs(a.x - b.x) < (a.width + b.width) / 2
    return is_wide and abs(a.y - b.y) < (a.height + b.height) / 2


def along(points: Sequence[Point]) -> Iterator[Point]:
    """Yield points of some cubic curves, every few pixels from the first end to the last."""
    for k in range(0, len(points) - 1, 3):
        a, b, c, d = points[k : k + 4]
        # By the distance of the ends: curves here are short, or nearly straight.
        count = max(2, ceil(hypot(d[0] - a[0], d[1] - a[1]) / STEP))
        for i in range(count + 1):
            t = i / count
            weights = (1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t * t * (1 - t), t**3
            x = sum(weight * point[0] for weight, point in zip(weights, (a, b, c, d), strict=True))
            y = sum(weight * point[1] for weight, point in zip(weights, (a, b, c, d), strict=True))
            yield x, y


__all__ = ["Taken", "along"]
