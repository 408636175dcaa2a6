"""Draw a scene that has its places as SVG.

In: a `Scene` and its `Layout`. Out: SVG text, the same bytes for the same input, which needs no other file.
What is told of a part besides its lines is its tooltip (`<title>`).

    svg = scene_svg(scene, find_places(scene))
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import atan2, ceil, cos, pi, sin
from xml.sax.saxutils import escape, quoteattr

from autoptd.viz.layout import Curve, Layout, Place, Point
from autoptd.viz.scene import INK, LEADING, PADDING, QUIET, SIZE, Frame, Item, Line, Link, Scene, text_width

MARGIN, GAP = 16.0, 12.0
TITLE, SUBTITLE = 17.0, 12.0
# Radius of the letter on a link.
LETTER = 6.5
STYLE = f"""
  text {{ font-family: Verdana, "DejaVu Sans", Helvetica, Arial, sans-serif; font-size: {SIZE:g}px; fill: {INK} }}
  .bold {{ font-weight: bold }}
  .quiet {{ fill: {QUIET} }}
  .on-bar {{ fill: #fff }}
  .title {{ font-size: {TITLE:g}px; font-weight: bold }}
  .subtitle {{ font-size: {SUBTITLE:g}px; fill: {QUIET} }}
  .letter {{ font-size: 10px; font-weight: bold; text-anchor: middle }}
  .heading text {{ paint-order: stroke; stroke: #fff; stroke-width: 3px; stroke-opacity: 0.8 }}
  .item:hover .body, .link:hover path {{ stroke-width: 3 }}
  .link path {{ fill: none }}
"""


def scene_svg(scene: Scene, places: Layout) -> str:
    """Return the picture as SVG text."""
    head, top = _head(scene, max(places.width, 760.0))
    texts = [
        text_width(scene.title, True, TITLE),
        *(text_width(text, False, SUBTITLE) for text in scene.subtitle),
    ]
    width, height = ceil(max(places.width, *texts) + 2 * MARGIN), ceil(top + places.height + MARGIN)
    body = [f'<g transform="translate({MARGIN:g} {top:g})">']
    for frame in scene.all_frames:
        body += _frame(frame, places.frames[frame.id])
    drawn = list(zip(scene.links, places.curves, strict=True))
    for link, curve in drawn:
        body += _link(link, curve)
    for frame in scene.all_frames:
        at = places.frames[frame.id]
        left, top = at.x - at.width / 2, at.y - at.height / 2
        body += ['<g class="heading">', *_lines(frame.title, left + PADDING, top + 4, at.width), "</g>"]
    for item in scene.items:
        body += _item(item, places.items[item.id])
    for link, curve in drawn:
        body += _on_link(link, curve)
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size}>',
            f"<style>{STYLE}</style>",
            f'<rect width="{width}" height="{height}" fill="#fff"/>',
            *head,
            *body,
            "</g>",
            "</svg>",
            "",
        ]
    )


def _head(scene: Scene, width: float) -> tuple[list[str], float]:
    """Return title, notes and legend above the picture, and how high they are."""
    y = MARGIN + TITLE
    out = [f'<text class="title" x="{MARGIN:g}" y="{y:g}">{escape(scene.title)}</text>']
    for text in (*scene.subtitle, *scene.notes):
        y += SUBTITLE * 1.45
        out.append(f'<text class="subtitle" x="{MARGIN:g}" y="{_n(y)}">{escape(text)}</text>')
    x, y, row = MARGIN, y + GAP, 0.0
    for item in scene.legend:
        if x > MARGIN and x + item.width > MARGIN + width:
            x, y, row = MARGIN, y + row + GAP / 2, 0.0
        out += _item(item, Place(x + item.width / 2, y + item.height / 2, item.width, item.height))
        x, row = x + item.width + GAP, max(row, item.height)
    return out, y + row + GAP


def _frame(frame: Frame, at: Place) -> Iterator[str]:
    left, top = at.x - at.width / 2, at.y - at.height / 2
    yield f'<g class="frame" id={quoteattr(frame.id)}>{_hint(frame.tooltip)}'
    yield (
        f'<rect x="{_n(left)}" y="{_n(top)}" width="{_n(at.width)}" height="{_n(at.height)}" rx="8"'
        f' fill="{frame.fill}" stroke="{frame.border}"/>'
    )
    yield "</g>"


def _item(item: Item, at: Place) -> Iterator[str]:
    left, top = at.x - at.width / 2, at.y - at.height / 2
    yield f'<g class="item" id={quoteattr(item.id)}>{_hint(item.tooltip)}'
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
            spans.append(f'<tspan class="{classes}">{escape(text)}</tspan>' if classes else escape(text))
        yield f'<text xml:space="preserve" x="{_n(x)}" y="{_n(base)}">{"".join(spans)}</text>'
        top += line.height


def _link(link: Link, curve: Curve) -> Iterator[str]:
    points = curve.points
    first, rest = points[0], points[1:]
    path = f"M{_xy(first)}C{' '.join(map(_xy, rest))}"
    dash = ' stroke-dasharray="5 4"' if link.dashed else ""
    yield f'<g class="link">{_hint(link.tooltip)}'
    yield f'<path d="{path}" stroke="{link.color}" stroke-width="{link.width:g}"{dash}/>'
    if link.has_head and curve.tip:
        # The last point may be the tip itself: the direction is that from the last one before it.
        before = next(point for point in reversed(points) if point != curve.tip)
        yield _arrow(before, curve.tip, link)
    yield "</g>"


def _arrow(before: Point, tip: Point, link: Link) -> str:
    angle = atan2(tip[1] - before[1], tip[0] - before[0])
    half = 2.6 + link.width / 2
    back = (tip[0] - 8 * cos(angle), tip[1] - 8 * sin(angle))
    sides = [
        (back[0] + half * cos(angle + turn), back[1] + half * sin(angle + turn)) for turn in (pi / 2, -pi / 2)
    ]
    return f'<polygon points="{" ".join(map(_xy, (tip, *sides)))}" fill="{link.color}"/>'


def _on_link(link: Link, curve: Curve) -> Iterator[str]:
    """Draw the letter on a link and the lines beside it, above everything else."""
    if link.letter:
        x, y = _middle(curve.points)
        circle = f'<circle cx="{_n(x)}" cy="{_n(y)}" r="{LETTER:g}" fill="#fff" stroke="{link.color}"/>'
        place = f'x="{_n(x)}" y="{_n(y + 3.6)}" style="fill:{link.color}"'
        text = f'<text class="letter" {place}>{escape(link.letter)}</text>'
        yield f'<g class="on-link">{_hint(link.tooltip)}{circle}{text}</g>'
    if link.lines and curve.label:
        width = max(line.width for line in link.lines)
        height = sum(line.height for line in link.lines)
        left, top = curve.label[0] - width / 2, curve.label[1] - height / 2 - 2
        yield f'<g class="on-link">{_hint(link.tooltip)}'
        place = f'x="{_n(left - 4)}" y="{_n(top - 1)}" width="{_n(width + 8)}" height="{_n(height + 2)}"'
        yield f'<rect {place} rx="3" fill="#fff" fill-opacity="0.85"/>'
        yield from _lines(link.lines, left, top, width)
        yield "</g>"


def _middle(points: Sequence[Point]) -> Point:
    """Return the point half way along the middle one of some cubic curves."""
    curves = (len(points) - 1) // 3
    if curves % 2 == 0:
        return points[3 * (curves // 2)]
    # A cubic Bezier curve at 1/2.
    a, b, c, d = points[3 * (curves // 2) : 3 * (curves // 2) + 4]
    return (a[0] + 3 * b[0] + 3 * c[0] + d[0]) / 8, (a[1] + 3 * b[1] + 3 * c[1] + d[1]) / 8


def _hint(text: str) -> str:
    return f"<title>{escape(text)}</title>" if text else ""


def _xy(point: Point) -> str:
    return f"{_n(point[0])},{_n(point[1])}"


def _n(value: float) -> str:
    """Format a number with at most one decimal."""
    return f"{value:.1f}".removesuffix(".0")


__all__ = ["scene_svg"]
