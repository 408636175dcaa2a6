"""Choose how the frames of a scene share the room: which are cut into columns, and which stand in a row.

In: a `Scene`. Out: for some of its frames, the `Arrangement`s that no other one beats; and the best
combination of these, which has the least area, unless it were much wider than a page, or a ribbon.

    choices = [find_arrangements([Tower.of(frame, scene) for frame in scene.frames])]
    best_of(choices)                    # ((Arrangement(rows=..., width=760, height=900, cuts=1),), False)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, product
from math import inf

from autoptd.wings.viz.layout import Place, lay_out
from autoptd.wings.viz.scene import PADDING, Frame, Item, Scene

# Pixels between the border of a frame and its columns, of a gutter and between rows, at least.
BORDER, GUTTER, ROW_GAP = 10.0, 30.0, 18.0
# A picture is about as wide as a page of documentation; one of much more than a screen has the shape of one.
PAGE_WIDTH, SCREEN_SHAPE = 1180.0, 1.3
# Pixels for the links above a row, about.
LANES = 40.0
# Least width over height, and the share of the area that a cut of a frame must save: links go around it.
MIN_SHAPE, CUT_COST = 0.8, 0.1
MAX_COLUMNS = 4
# Pixels between the heights of columns that are tried.
HEIGHT_STEP = 40


@dataclass(frozen=True)
class Block:
    """A frame (or an item alone) with its columns, each the parts from top to bottom."""

    part: Frame | Item
    columns: tuple[tuple[Frame | Item, ...], ...]
    width: float
    height: float


@dataclass(frozen=True)
class Arrangement:
    """Blocks in rows, and about how much room these take; `cuts` are those of frames into columns."""

    rows: tuple[tuple[Block, ...], ...]
    width: float
    height: float
    cuts: int


@dataclass(frozen=True)
class Tower:
    """A frame as one column: its parts from top to bottom, and where each begins and ends."""

    part: Frame | Item
    parts: tuple[Frame | Item, ...]
    places: tuple[Place, ...]
    width: float

    @staticmethod
    def of(part: Frame | Item, scene: Scene) -> Tower:
        if isinstance(part, Item):
            return Tower(part, (part,), (Place(0, part.height / 2, part.width, part.height),), part.width)
        found = lay_out(column_scene(scene, part.inside))
        places = found.frames | found.items
        placed = [places[inner.id] for inner in part.inside]
        # A value that nothing in the frame makes goes with its first reader, wherever that is.
        for i, reader in _first_readers(part, scene, placed).items():
            low = placed[reader].top
            placed[i] = Place(placed[i].x, low + placed[i].height / 2, placed[i].width, placed[i].height)
        order = sorted(range(len(placed)), key=lambda i: (placed[i].top, i))
        parts = tuple(part.inside[i] for i in order)
        return Tower(part, parts, tuple(placed[i] for i in order), found.width)

    @property
    def height(self) -> float:
        return max(place.bottom for place in self.places) - self.places[0].top

    @property
    def heights(self) -> set[float]:
        """The least heights of this frame in one to four columns."""
        return {self._cut(target)[1] for target in range(int(self.height) + 1, 0, -HEIGHT_STEP)}

    @property
    def whole(self) -> Block:
        """The frame in one column."""
        return self.split(self.height)

    def split(self, target: float) -> Block:
        """Return the frame in as few columns as have no more than a height."""
        # Widths are those of the frame in one piece: a column by itself is seldom wider.
        cuts, height = self._cut(target)
        columns = tuple(self.parts[first:last] for first, last in pairwise(cuts))
        if isinstance(self.part, Item):
            return Block(self.part, columns, self.width, height)
        width = GUTTER * (len(cuts) - 2)
        for first, last in pairwise(cuts):
            places = self.places[first:last]
            width += max(place.right for place in places) - min(place.left for place in places)
        width = max(width, title_width(self.part)) + 2 * BORDER
        return Block(self.part, columns, width, height + title_height(self.part) + 2 * BORDER)

    def _cut(self, target: float) -> tuple[list[int], float]:
        """Return the bounds of columns of at most `target` pixels, and the height of the tallest; parts that
        stand beside each other stay together.
        """
        cuts, top, tallest, low = [0], self.places[0].top, 0.0, 0.0
        for i, place in enumerate(self.places):
            # A cut between parts that overlap would tear neighbours apart.
            is_free = place.top >= low
            if place.bottom - top > target and is_free and i > cuts[-1] and len(cuts) < MAX_COLUMNS:
                cuts.append(i)
                top = place.top
            low = max(low, place.bottom)
            tallest = max(tallest, place.bottom - top)
        return [*cuts, len(self.places)], tallest


def _first_readers(frame: Frame, scene: Scene, placed: Sequence[Place]) -> dict[int, int]:
    """Return the topmost reader of each part that no link of its frame leads to, by their numbers."""
    number = {item.id: i for i, part in enumerate(frame.inside) for item in items_of(part)}
    pairs = []
    for link in scene.links:
        if link.weight and link.source in number and link.target in number:
            pairs.append((number[link.source], number[link.target]))
    made = {target for source, target in pairs if source != target}
    readers: dict[int, int] = {}
    for source, target in sorted(pairs, key=lambda pair: placed[pair[1]].top):
        if source not in made and source != target:
            readers.setdefault(source, target)
    return readers


def find_arrangements(towers: Sequence[Tower]) -> list[Arrangement]:
    """Return the arrangements of some frames, in columns of all sensible heights and rows of all widths,
    without those that another one beats in all respects.
    """
    found: dict[tuple[int, int, int], Arrangement] = {}
    heights: set[float] = set()
    for tower in towers:
        heights |= tower.heights
    for target in sorted(heights):
        blocks = [tower.split(target) for tower in towers]
        widths = [block.width + GUTTER for block in blocks]
        # Rows as long as the first of so many blocks.
        for limit in accumulate(widths):
            made = _arranged(_fill(blocks, max(limit, max(widths))))
            # Whole pixels: arrangements that differ by less are one.
            found.setdefault((int(made.width), int(made.height), made.cuts), made)
    least: list[Arrangement] = []
    # By width: one is beaten by an earlier one that is neither taller nor cut more often.
    for key in sorted(found):
        made = found[key]
        is_beaten = any(other.height <= made.height and other.cuts <= made.cuts for other in least)
        if not is_beaten:
            least.append(made)
    return least


def _arranged(rows: Sequence[Sequence[Block]]) -> Arrangement:
    width, height, cuts = 0.0, 0.0, 0
    for row in rows:
        width = max(width, sum(block.width + GUTTER for block in row))
        height += max(block.height for block in row) + LANES
        cuts += sum(len(block.columns) - 1 for block in row)
    return Arrangement(tuple(map(tuple, rows)), width, height, cuts)


def best_of(choices: Sequence[Sequence[Arrangement]]) -> tuple[tuple[Arrangement, ...], bool]:
    """Return an arrangement of the stages and one of the samples, and whether these stand side by side."""
    best, least = (tuple(options[0] for options in choices), False), inf
    for parts, is_beside in product(product(*choices), (True, False)):
        widths, heights = [part.width for part in parts], [part.height for part in parts]
        width = sum(widths) if is_beside else max(widths)
        height = max(heights) if is_beside else sum(heights)
        cost = _cost(width, height, sum(part.cuts for part in parts))
        if cost < least:
            best, least = (parts, is_beside), cost
    return best


def _fill(blocks: Sequence[Block], limit: float) -> list[list[Block]]:
    """Put blocks side by side, in rows of at most `limit` pixels."""
    rows: list[list[Block]] = [[]]
    for block in blocks:
        width = sum(other.width + GUTTER for other in rows[-1])
        if rows[-1] and width + block.width + GUTTER > limit + 1:
            rows.append([])
        rows[-1].append(block)
    return rows


def _cost(width: float, height: float, cuts: int) -> float:
    """Return an area, and more for what is wider than a page, much taller than wide, or torn into columns."""
    area = width * height
    # More than a screen is drawn wider, so that it does not become a ribbon.
    page = max(PAGE_WIDTH, SCREEN_SHAPE * area**0.5)
    return area * max(1.0, width / page) ** 2 * max(1.0, MIN_SHAPE * height / width) * (1 + CUT_COST * cuts)


def title_width(frame: Frame) -> float:
    return max((line.width for line in frame.title), default=0.0)


def title_height(frame: Frame) -> float:
    return sum(line.height for line in frame.title) + PADDING


def column_scene(scene: Scene, parts: Sequence[Frame | Item]) -> Scene:
    """Return the parts of one column as a picture of its own, with the links between them."""
    inside = {item.id for part in parts for item in items_of(part)}
    links = [link for link in scene.links if link.weight and {link.source, link.target} <= inside]
    return Scene("", (), tuple(parts), tuple(links))


def items_of(part: Frame | Item) -> Iterator[Item]:
    if isinstance(part, Frame):
        yield from part.items
    else:
        yield part


__all__ = [
    "BORDER",
    "GUTTER",
    "ROW_GAP",
    "Arrangement",
    "Block",
    "Tower",
    "best_of",
    "column_scene",
    "find_arrangements",
    "items_of",
    "title_height",
    "title_width",
]
