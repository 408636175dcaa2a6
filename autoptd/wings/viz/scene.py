"""Define a picture of a graph as plain data, without a layout: boxes of text lines, frames around them, and links.

`graphviz.py` writes a scene in the DOT language and draws it.

    box = Item("a", (line(("c_fc", "bold"), (" linear", "quiet")), line("[4, 128, 768]")), fill=COLUMN)
    Scene("GPT", (), (Frame("f", (line("h.0"),), (box,)),), ()).items
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autoptd.program.specs import Collective

INK, QUIET = "#26303b", "#6b7682"


@dataclass(frozen=True)
class Line:
    """One line of text: pieces of (text, style), where style is "", "bold" or "quiet"; `bar`: a background colour."""

    pieces: tuple[tuple[str, str], ...]
    bar: str = ""

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.pieces)


@dataclass(frozen=True)
class Item:
    """A box with its collectives, `calls`; `shape` is "box", "note" (an input), "stack" (several) or "pill"."""

    id: str
    lines: tuple[Line, ...]
    fill: str = "#ffffff"
    border: str = "#9aa4ae"
    shape: str = "box"
    thick: float = 1.0
    dashed: bool = False
    tooltip: str = ""
    calls: tuple[Collective, ...] = ()


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
    """An arrow with a `letter` on it and `lines` next to it; `weight`: how straight it is (0: ignored by the layout)."""

    source: str
    target: str
    color: str = INK
    width: float = 1.2
    dashed: bool = False
    letter: str = ""
    lines: tuple[Line, ...] = ()
    tooltip: str = ""
    weight: int = 1
    calls: tuple[Collective, ...] = ()


@dataclass(frozen=True)
class Scene:
    """A whole picture: `rows` are ids of items side by side if it is a grid; `samples` are frames after the others.

    Links connect boxes of one frame, or of the grid.
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
            # Outer frames first, as inner ones are drawn on top of them.
            waiting += [inner for inner in frame.inside if isinstance(inner, Frame)]

    @property
    def all_calls(self) -> Iterator[Collective]:
        """Yield every collective in the picture."""
        parts: list[Item | Frame | Link | Scene] = [*self.items, *self.all_frames, *self.links, self]
        for part in parts:
            yield from part.calls


def line(*pieces: str | tuple[str, str], bar: str = "") -> Line:
    """Make a line of plain strings and (text, style) pieces."""
    return Line(tuple((piece, "") if isinstance(piece, str) else piece for piece in pieces), bar)
