"""Route links between columns that stand side by side in rows.

In: rows of columns, each laid out, and the links that go from one to another. Out: a curve for each link.

A link leaves its box to the side, to the right unless another box is in the way, and runs on a *track* of
the *gutter* there. Where its target is not at the same gutter, it goes on in a *lane* of a *band* above the
row of its target, or below the title of a frame that holds both ends.

    router = Router(rows, blocks, links)            # how wide gutters and how high bands have to be
    router.gutter(0, 1).left = 300.0                # the caller says where they are
    router.curves()
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import hypot

from autoptd.wings.viz.layout import ARROW, Curve, Layout, Place, Point
from autoptd.wings.viz.scene import Link

# Pixels: around a gutter, between tracks or lanes, of corners, around lines, between links at a box's side.
EDGE, TRACK, CORNER, SPACE, PORT = 10.0, 9.0, 8.0, 8.0, 8.0
# Pixels above and below a link that another box must not reach into.
CLEAR = 3.0
# (row, number of the column on its right).
GutterKey = tuple[int, int]
# The row below a band, and the block that it is in (-1: above all blocks of the row).
BandKey = tuple[int, int]


@dataclass
class Column:
    """A column that is laid out, in block `block` of row `row`; `x` and `y` are where it is put."""

    places: Layout
    row: int
    block: int
    index: int
    x: float = 0.0
    y: float = 0.0

    def place(self, name: str) -> Place:
        """Return where an item is in the picture."""
        return self.places.items[name].moved(self.x, self.y)

    def is_clear(self, name: str, side: int) -> bool:
        """Tell whether a link can leave an item to the right (1) or to the left (-1), past all others."""
        place = self.places.items[name]
        for other, at in self.places.items.items():
            # Boxes above and below do not matter: a link leaves on one level.
            is_level = at.top - CLEAR < place.y < at.bottom + CLEAR
            if other != name and is_level and (at.x - place.x) * side > 0:
                return False
        return True


@dataclass
class Gutter:
    """The space between two columns: its left end, its tracks, and how far down it is written on."""

    left: float = 0.0
    tracks: int = 0
    taken: int = 0
    lines: float = 0.0
    written: float = 0.0

    @property
    def width(self) -> float:
        if not self.tracks:
            return 0.0
        return EDGE + TRACK * (self.tracks - 1) + (self.lines + SPACE if self.lines else 0.0) + EDGE

    def track(self) -> float:
        """Take the next free track and return its x."""
        self.taken += 1
        return self.left + EDGE + TRACK * (self.taken - 1)

    def write(self, top: float, width: float, height: float) -> Point:
        """Return the centre of lines that are to begin at `top`, or below what is written already."""
        top = max(top, self.written)
        self.written = top + height
        return self.left + EDGE + TRACK * (self.tracks - 1) + SPACE + width / 2, top + height / 2


@dataclass
class Band:
    """The space above a row: its upper end, and the heights of its lanes."""

    top: float = 0.0
    lanes: list[float] = field(default_factory=list)
    taken: int = 0

    @property
    def height(self) -> float:
        return sum(self.lanes)

    def lane(self) -> float:
        """Take the next free lane and return its y; lines stand above it."""
        self.taken += 1
        return self.top + sum(self.lanes[: self.taken]) - TRACK / 2


@dataclass(frozen=True)
class Route:
    """The way of one link: its ends, on which side it leaves and enters (1: right), gutters, and bands."""

    link: Link
    source: Column
    target: Column
    out: int
    into: int
    bands: tuple[BandKey, ...]

    @property
    def first(self) -> GutterKey:
        return self.source.row, self.source.index + (self.out > 0)

    @property
    def last(self) -> GutterKey:
        return self.target.row, self.target.index + (self.into > 0)


class Router:
    """Plans how much space the links of a picture need, and then draws them."""

    def __init__(self, columns: Sequence[Column], links: Mapping[int, Link]) -> None:
        self.gutters: dict[GutterKey, Gutter] = {}
        self.bands: dict[BandKey, Band] = {}
        # Tracks to the left of everything, for links that pass by whole rows.
        self.margin = Gutter()
        home: dict[str, Column] = {}
        for column in columns:
            home |= dict.fromkeys(column.places.items, column)
        self.routes = {k: _route(link, home) for k, link in links.items()}
        for route in self.routes.values():
            self._reserve(route)
        self.ports = self._ports()
        self.used: Counter[tuple[str, int]] = Counter()

    def gutter(self, row: int, index: int) -> Gutter:
        """Return the gutter to the left of a column."""
        return self.gutters.setdefault((row, index), Gutter())

    def band(self, row: int, block: int = -1) -> Band:
        """Return the band above a row, or that below the title of a block."""
        return self.bands.setdefault((row, block), Band())

    def curves(self) -> dict[int, Curve]:
        """Return the curve of each link; all columns, gutters and bands have been put in their places."""
        return {k: self._curve(route) for k, route in self.routes.items()}

    def _reserve(self, route: Route) -> None:
        link, height = route.link, lines_height(route.link)
        gutter = self.gutter(*route.first)
        gutter.tracks += 1
        if route.bands:
            self.gutter(*route.last).tracks += 1
        else:
            gutter.lines = max([gutter.lines, *(line.width for line in link.lines)])
        for key in route.bands:
            # Lines stand on the last lane.
            is_labelled = height and key == route.bands[-1]
            self.band(*key).lanes.append(TRACK + (height + SPACE if is_labelled else 0.0))
        self.margin.tracks += len(route.bands) > 1

    def _ports(self) -> Counter[tuple[str, int]]:
        """Count the links at each side of each item."""
        ports: Counter[tuple[str, int]] = Counter()
        for route in self.routes.values():
            ports[route.link.source, route.out] += 1
            ports[route.link.target, route.into] += 1
        return ports

    def _port(self, column: Column, name: str, side: int) -> Point:
        """Return the next free point at a side of an item; several links share the side evenly."""
        place, count = column.place(name), self.ports[name, side]
        # So many links may meet at a low box that they must move closer together.
        step = min(PORT, place.height / (count + 1))
        y = place.y + (self.used[name, side] - (count - 1) / 2) * step
        self.used[name, side] += 1
        return place.x + side * place.width / 2, y

    def _is_only(self, route: Route) -> bool:
        link = route.link
        return self.ports[link.source, route.out] == self.ports[link.target, route.into] == 1

    def _curve(self, route: Route) -> Curve:
        link = route.link
        start = self._port(route.source, link.source, route.out)
        end = self._port(route.target, link.target, route.into)
        if not route.bands and self._is_only(route):
            start, end = _levelled(
                start, end, route.source.place(link.source), route.target.place(link.target)
            )
        first = self.gutters[route.first]
        x = first.track()
        points = [start, (x, start[1])]
        width, height = max((line.width for line in link.lines), default=0.0), lines_height(link)
        label: Point | None = None
        if not route.bands:
            # Above the end of the link, which passes the lines by; below it where others stand there.
            above, below = end[1] - height - SPACE / 2, end[1] + SPACE
            label = first.write(above if above >= first.written else below, width, height)
        else:
            lanes = [self.bands[key].lane() for key in route.bands]
            if len(lanes) > 1:
                side = self.margin.track()
                points += [(x, lanes[0]), (side, lanes[0])]
                x = side
            into = self.gutters[route.last].track()
            points += [(x, lanes[-1]), (into, lanes[-1])]
            left = min(x, into) + SPACE
            if route.bands[-1][1] >= 0:
                # Within a frame, whose border the gutter on its left lies beyond.
                left = max(left, min(route.source.x, route.target.x))
            label = left + width / 2, lanes[-1] - height / 2 - 2
            x = into
        points.append((x, end[1]))
        tip = end if link.has_head else None
        if tip:
            # The line ends where the arrow head begins.
            end = end[0] + route.into * ARROW, end[1]
        return Curve(_rounded([*points, end]), tip, label if link.lines else None)


def _route(link: Link, home: Mapping[str, Column]) -> Route:
    source, target = home[link.source], home[link.target]
    # Ties go around the outside, out of the way of what flows from left to right.
    outwards = 1 if link.has_head else -1
    out, into = _side(source, link.source, outwards), _side(target, link.target, -outwards)
    first, last = (source.row, source.index + (out > 0)), (target.row, target.index + (into > 0))
    bands: tuple[BandKey, ...] = ((last[0], -1),)
    if first == last:
        bands = ()
    elif (source.row, source.block) == (target.row, target.block):
        bands = ((source.row, source.block),)
    elif not 0 <= last[0] - first[0] <= 1:
        # The band next to the source, on the side on which the target is.
        below = first[0] + 1 if last[0] > first[0] else first[0]
        bands = ((below, -1), (last[0], -1))
    return Route(link, source, target, out, into, bands)


def _side(column: Column, name: str, wanted: int) -> int:
    """Return the side at which a link meets an item: the wanted one, unless only the other one is clear."""
    is_better = not column.is_clear(name, wanted) and column.is_clear(name, -wanted)
    return -wanted if is_better else wanted


def _levelled(start: Point, end: Point, source: Place, target: Place) -> tuple[Point, Point]:
    """Put both ends of a link on one level, if both boxes reach there: it is straight then."""
    low, high = max(source.top, target.top) + PORT, min(source.bottom, target.bottom) - PORT
    if low > high:
        return start, end
    level = (low + high) / 2
    return (start[0], level), (end[0], level)


def lines_height(link: Link) -> float:
    """Return the pixels that the lines of a link take."""
    return sum(line.height for line in link.lines)


def _rounded(points: Sequence[Point]) -> tuple[Point, ...]:
    """Return straight lines with round corners, as cubic curves."""
    # As cubic curves, like those of graphviz: what draws them need not know who made them.
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


__all__ = ["EDGE", "Column", "Router", "lines_height"]
