"""What a graph picture is made of: boxes of text lines, frames around them, and links.

Plain data, without a layout.

In: nothing. `layout.py` writes a scene in the DOT language and finds its places, `graph_svg.py` draws it.

    box = Item("a", (line(("c_fc", "bold"), (" linear", "quiet")), line("[4, 128, 768]")), fill=COLUMN)
    Scene("GPT", (), (Frame("f", (line("h.0"),), (box,)),), ()).items
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autoptd.program.specs import Collective

INK, QUIET = "#26303b", "#6b7682"
# Sizes of text in pixels (points in DOT), line height over text size, pixels around the lines of a box.
SIZE, SMALL, LEADING, PADDING = 11.0, 10.0, 1.36, 7.0
# Letters of unusual width, for `text_width`.
NARROW, WIDE = frozenset("iljtfrI.,:;'|!()[] "), frozenset("mwMW@%&")


@dataclass(frozen=True)
class Line:
    """One line of text: pieces of (text, style), style being "", "bold" or "quiet".

    `bar` is the colour behind it, if any.
    """

    pieces: tuple[tuple[str, str], ...]
    bar: str = ""

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.pieces)

    @property
    def width(self) -> float:
        """Pixels that it takes in the widest of the fonts that are asked for (Verdana, DejaVu Sans)."""
        return sum(text_width(text, style == "bold") for text, style in self.pieces) + (10 if self.bar else 0)

    @property
    def height(self) -> float:
        return SIZE * LEADING + (3 if self.bar else 0)


@dataclass(frozen=True)
class Item:
    """A box: `shape` is "box", "note" (an input), "stack" (several) or "pill".

    `calls` are what it communicates.
    """

    id: str
    lines: tuple[Line, ...]
    fill: str = "#ffffff"
    border: str = "#9aa4ae"
    shape: str = "box"
    thick: float = 1.0
    dashed: bool = False
    tooltip: str = ""
    calls: tuple[Collective, ...] = ()
    least_width: float = 0.0

    @property
    def width(self) -> float:
        # The ends of a pill are round, and text must not reach into them.
        sides = 2 * PADDING + (10 if self.shape == "pill" else 0)
        return max([self.least_width, *(row.width + sides for row in self.lines)])

    @property
    def height(self) -> float:
        return sum(row.height for row in self.lines) + PADDING


@dataclass(frozen=True)
class Frame:
    """A named area around items and other frames."""

    id: str
    title: tuple[Line, ...]
    inside: tuple[Item | Frame, ...]
    fill: str = "none"
    border: str = "#b8c0c8"
    tooltip: str = ""
    calls: tuple[Collective, ...] = ()

    @property
    def items(self) -> Iterator[Item]:
        for part in self.inside:
            if isinstance(part, Frame):
                yield from part.items
            else:
                yield part


@dataclass(frozen=True)
class Link:
    """An arrow; `letter` stands on it, `lines` beside it.

    `weight`: how much it wants to be straight and short (0: it has no say in where boxes are).
    """

    source: str
    target: str
    color: str = INK
    width: float = 1.2
    dashed: bool = False
    letter: str = ""
    lines: tuple[Line, ...] = ()
    tooltip: str = ""
    weight: int = 1
    has_head: bool = True
    calls: tuple[Collective, ...] = ()


@dataclass(frozen=True)
class Scene:
    """A whole picture.

    `legend` explains boxes; `rows` are ids of items side by side, where it is a grid; `samples` are frames
    below the others.
    """

    title: str
    subtitle: tuple[str, ...]
    frames: tuple[Frame | Item, ...]
    links: tuple[Link, ...]
    legend: tuple[Item, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    notes: tuple[str, ...] = ()
    # Collectives that the notes name.
    calls: tuple[Collective, ...] = ()
    samples: tuple[Frame, ...] = ()

    @property
    def parts(self) -> tuple[Frame | Item, ...]:
        return (*self.frames, *self.samples)

    @property
    def items(self) -> Iterator[Item]:
        for part in self.parts:
            if isinstance(part, Frame):
                yield from part.items
            else:
                yield part

    @property
    def all_frames(self) -> Iterator[Frame]:
        waiting = [part for part in self.parts if isinstance(part, Frame)]
        while waiting:
            frame = waiting.pop(0)
            yield frame
            # Outer frames first: inner ones are drawn on top of them.
            waiting += [inner for inner in frame.inside if isinstance(inner, Frame)]

    @property
    def all_calls(self) -> Iterator[Collective]:
        """Yield every collective that is shown somewhere in the picture."""
        parts: list[Item | Frame | Link | Scene] = [*self.items, *self.all_frames, *self.links, self]
        for part in parts:
            yield from part.calls


def line(*pieces: str | tuple[str, str], bar: str = "") -> Line:
    """Make a line of plain strings and (text, style) pieces."""
    return Line(tuple((piece, "") if isinstance(piece, str) else piece for piece in pieces), bar)


def text_width(text: str, is_bold: bool = False, size: float = SIZE) -> float:
    """Estimate the pixels of a text in Verdana or DejaVu Sans; in Helvetica it takes no more."""
    # Graphviz needs widths before any font is known; a box that is a little wide does no harm.
    ems = sum(map(_ems, text))
    return size * ems * (1.1 if is_bold else 1.0)


def _ems(letter: str) -> float:
    """Estimate the width of a letter, relative to the text size."""
    if letter in NARROW:
        return 0.40
    if letter in WIDE:
        return 0.96
    return 0.72 if letter.isupper() else 0.63


__all__ = ["INK", "QUIET", "Frame", "Item", "Line", "Link", "Scene", "line", "text_width"]
