"""Draw a scene that has its places as SVG.

In: a `Scene` and its `Layout`. Out: SVG text, the same bytes for the same input, which needs no other file.
What is told of a part besides its lines is its tooltip (`<title>`).

    svg = scene_svg(scene, find_places(scene))
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import atan2, ceil, cos, hypot, pi, sin
from xml.sax.saxutils import quoteattr

from autoptd.wings.viz.dark import dark_rules
from autoptd.wings.viz.layout import Curve, Layout, Place, Point
from autoptd.wings.viz.scene import (
    INK,
    LEADING,
    PADDING,
    QUIET,
    SIZE,
    Frame,
    Item,
    Line,
    Link,
    Scene,
    text_width,
)
from autoptd.wings.viz.taken import Taken, along
from autoptd.wings.viz.words import visible, xml_text

MARGIN, GAP = 16.0, 12.0
TITLE, SUBTITLE = 17.0, 12.0
# Radius of the letter on a link.
LETTER = 6.5
# Pixels that the legend may take, however narrow the picture is.
MIN_WIDTH = 760.0
STYLE = f"""
  text {{ font-family: Verdana, "DejaVu Sans", Helvetica, Arial, sans-serif; font-size: {SIZE:g}px; fill: {INK} }}
  .bold {{ font-weight: bold }}
  .quiet {{ fill: {QUIET} }}
  .on-bar {{ fill: #fff }}
  .title {{ font-size: {TITLE:g}px; font-weight: bold }}
  .subtitle {{ font-size: {SUBTITLE:g}px; fill: {QUIET} }}
  .letter {{ font-size: 10px; font-weight: bold; text-anchor: middle }}
  .item:hover .body, .link:hover path {{ stroke-width: 3 }}
  .link path {{ fill: none }}
"""


def scene_svg(scene: Scene, places: Layout) -> str:
    """Return the picture as SVG text."""
    # The legend may be wider than a small picture: it would be a column of one sample a line otherwise.
    head, top = _head(scene, max(places.width, MIN_WIDTH))
    texts = [
        text_width(scene.title, True, TITLE),
        *(text_width(text, False, SUBTITLE) for text in scene.subtitle),
    ]
    width, height = ceil(max(places.width, *texts) + 2 * MARGIN), ceil(top + places.height + MARGIN)
    body = [f'<g transform="translate({MARGIN:g} {top:g})">', *_parts(scene, places), "</g>"]
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    drawn = "\n".join([f'<rect width="{width}" height="{height}" fill="#fff"/>', *head, *body])
    style = f"<style>{STYLE}{dark_rules(drawn)}</style>"
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', style, drawn, "</svg>", ""])


def _parts(scene: Scene, places: Layout) -> Iterator[str]:
    """Draw everything below the head: frames, links, headings, boxes, and what stands on links."""
    # Headings and boxes cover links; letters must not cover headings and boxes.
    taken = Taken()
    for item in scene.items:
        taken.add(places.items[item.id])
    for frame in scene.all_frames:
        yield from _frame(frame, places.frames[frame.id])
        taken.add(_heading_place(frame, places.frames[frame.id]))
    drawn = [(link, places.curves[k]) for k, link in enumerate(scene.links)]
    for link, curve in drawn:
        yield from _link(link, curve)
    for frame in scene.all_frames:
        at = places.frames[frame.id]
        heading = _heading_place(frame, at)
        yield '<g class="heading">'
        # Links that pass below a heading are not to strike it through.
        if frame.fill != "none":
            size = f'width="{_n(heading.width)}" height="{_n(heading.height)}"'
            yield f'<rect x="{_n(heading.left)}" y="{_n(heading.top)}" {size} fill="{frame.fill}"/>'
        yield from _lines(frame.title, at.left + PADDING, at.top + 4, at.width)
        yield "</g>"
    for item in scene.items:
        yield from _item(item, places.items[item.id])
    for link, curve in drawn:
        yield from _on_link(link, curve, taken)


def _heading_place(frame: Frame, at: Place) -> Place:
    width = max(line.width for line in frame.title)
    height = sum(line.height for line in frame.title)
    return Place(at.left + PADDING + width / 2, at.top + 4 + height / 2, width, height)


def _head(scene: Scene, width: float) -> tuple[list[str], float]:
    """Return title, notes and legend above the picture, and how high they are."""
    y = MARGIN + TITLE
    out = [f'<text class="title" x="{MARGIN:g}" y="{y:g}">{xml_text(scene.title)}</text>']
    for text in (*scene.subtitle, *scene.notes):
        y += SUBTITLE * 1.45
        out.append(f'<text class="subtitle" x="{MARGIN:g}" y="{_n(y)}">{xml_text(text)}</text>')
    x, y, row = MARGIN, y + GAP, 0.0
    for item in scene.legend:
        if x > MARGIN and x + item.width > MARGIN + width:
            x, y, row = MARGIN, y + row + GAP / 2, 0.0
        out += _item(item, Place(x + item.width / 2, y + item.height / 2, item.width, item.height))
        x, row = x + item.width + GAP, max(row, item.height)
    return out, y + row + GAP


def _frame(frame: Frame, at: Place) -> Iterator[str]:
    left, top = at.left, at.top
    yield f'<g class="frame" id={quoteattr(visible(frame.id))}>{_hint(frame.tooltip)}'
    yield (
        f'<rect x="{_n(left)}" y="{_n(top)}" width="{_n(at.width)}" height="{_n(at.height)}" rx="8"'
        f' fill="{frame.fill}" stroke="{frame.border}"/>'
    )
    yield "</g>"


def _item(item: Item, at: Place) -> Iterator[str]:
    left, top = at.left, at.top
    yield f'<g class="item" id={quoteattr(visible(item.id))}>{_hint(item.tooltip)}'
    yield from _body(item, left, top, at)
    high = sum(line.height for line in item.lines)
    indent = PADDING + (5 if item.shape == "pill" else 0)
    yield from _lines(item.lines, left + indent, top + (at.height - high) / 2, at.width - 2 * indent)
    yield "</g>"


def _body(item: Item, left: float, top: float, at: Place) -> Iterator[str]:
    dash = ' stroke-dasharray="4 3"' if item.dashed else ""
    look = f'fill="{item.fill}" stroke="{item.border}" stroke-width="{item.thick:g}"{dash}'
    radius = at.height / 2 if item.shape == "pill" else 5
    if item.shape == "note":
        right, low, fold = left + at.width, top + at.height, 8
        path = f"M{_n(left)} {_n(top)}H{_n(right - fold)}L{_n(right)} {_n(top + fold)}V{_n(low)}H{_n(left)}Z"
        yield f'<path class="body" d="{path}" {look}/>'
        return
    # The sheets behind the first are drawn first.
    offsets = (6, 3, 0) if item.shape == "stack" else (0,)
    for offset in offsets:
        size = f'width="{_n(at.width)}" height="{_n(at.height)}" rx="{_n(radius)}"'
        yield f'<rect class="body" x="{_n(left + offset)}" y="{_n(top + offset)}" {size} {look}/>'


def _lines(lines: Sequence[Line], left: float, top: float, width: float) -> Iterator[str]:
    """Draw lines of text below each other; a bar is as wide as the box."""
    for line in lines:
        base = top + SIZE * (LEADING + 1) / 2 - 1.5
        x = left
        if line.bar:
            place = (
                f'x="{_n(left - 2)}" y="{_n(top + 1)}" width="{_n(width + 4)}" height="{_n(line.height - 2)}"'
            )
            yield f'<rect {place} rx="3" fill="{line.bar}"/>'
            x, base = left + 3, base + 1
        spans = []
        for text, style in line.pieces:
            classes = f"on-bar {style}".strip() if line.bar else style
            spans.append(f'<tspan class="{classes}">{xml_text(text)}</tspan>' if classes else xml_text(text))
        yield f'<text xml:space="preserve" x="{_n(x)}" y="{_n(base)}">{"".join(spans)}</text>'
        top += line.height


def _link(link: Link, curve: Curve) -> Iterator[str]:
    points = curve.points
    # One path element: a dash pattern would begin anew at each curve.
    first, rest = points[0], points[1:]
    path = f"M{_xy(first)}C{' '.join(map(_xy, rest))}"
    dash = ' stroke-dasharray="5 4"' if link.dashed else ""
    yield f'<g class="link">{_hint(link.tooltip)}'
    yield f'<path d="{path}" stroke="{link.color}" stroke-width="{link.width:g}"{dash}/>'
    if link.has_head and curve.tip:
        yield _arrow(points[-1], curve.tip, link)
    yield "</g>"


def _arrow(base: Point, tip: Point, link: Link) -> str:
    """Draw an arrow head from the end of its line to the box that it points at."""
    angle = atan2(tip[1] - base[1], tip[0] - base[0])
    half = 2.9 + 0.6 * link.width
    # It begins a pixel before the line ends, so that no gap is seen.
    back = (base[0] - cos(angle), base[1] - sin(angle))
    sides = [
        (back[0] + half * cos(angle + turn), back[1] + half * sin(angle + turn)) for turn in (pi / 2, -pi / 2)
    ]
    return f'<polygon points="{" ".join(map(_xy, (tip, *sides)))}" fill="{link.color}"/>'


def _on_link(link: Link, curve: Curve, taken: Taken) -> Iterator[str]:
    """Draw the letter on a link and the lines beside it, above everything else.

    The letter stands where the link begins, or as near to it as nothing in `taken` is covered.
    """
    at = _letter_place(curve.points, taken) if link.letter else None
    if at:
        taken.add(at)
        circle = (
            f'<circle cx="{_n(at.x)}" cy="{_n(at.y)}" r="{LETTER:g}" fill="#ffffff" stroke="{link.color}"/>'
        )
        span = f'<tspan fill="{link.color}">{xml_text(link.letter)}</tspan>'
        text = f'<text class="letter" x="{_n(at.x)}" y="{_n(at.y + 3.6)}">{span}</text>'
        yield f'<g class="on-link">{_hint(link.tooltip)}{circle}{text}</g>'
    if link.lines and curve.label:
        # Lines stand on a ground of their own, as links may pass below them.
        width = max(line.width for line in link.lines)
        height = sum(line.height for line in link.lines)
        left, top = curve.label[0] - width / 2, curve.label[1] - height / 2 - 2
        yield f'<g class="on-link">{_hint(link.tooltip)}'
        place = f'x="{_n(left - 4)}" y="{_n(top - 1)}" width="{_n(width + 8)}" height="{_n(height + 2)}"'
        yield f'<rect {place} rx="3" fill="#fff" fill-opacity="0.85"/>'
        yield from _lines(link.lines, left, top, width)
        yield "</g>"


def _letter_place(points: Sequence[Point], taken: Taken) -> Place | None:
    """Return where a letter has room on a link; None where it has none, or is on the same spot already."""
    for x, y in along(points):
        spot = Place(x, y, 2 * LETTER, 2 * LETTER)
        hit = taken.find(spot)
        if hit is None:
            return spot
        # Links that leave a box together carry the same value: one letter tells the type of all.
        if hit.width == spot.width and hypot(hit.x - x, hit.y - y) < LETTER:
            return None
    return None


def _hint(text: str) -> str:
    return f"<title>{xml_text(text)}</title>" if text else ""


def _xy(point: Point) -> str:
    return f"{_n(point[0])},{_n(point[1])}"


def _n(value: float) -> str:
    """Format a number with at most one decimal."""
    return f"{value:.1f}".removesuffix(".0")


__all__ = ["scene_svg"]
