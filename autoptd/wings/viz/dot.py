"""Write a scene in the DOT language.

In: a `Scene`. Out: DOT text, the same bytes for the same scene, which any graphviz draws plainly.

    scene_dot(scene)                # 'digraph program {...'
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from autoptd.wings.viz.scene import Frame, Item, Line, Link, Scene
from autoptd.wings.words import visible

# The widest of the common fonts, so that text fits in its box with any of them.
FONT = "Verdana"
SIZE = 11
LEGEND_COLUMNS = 6


def scene_dot(scene: Scene) -> str:
    """Return the scene in the DOT language."""
    graph = {"rankdir": "TB", "nodesep": "0.2", "ranksep": _gap(scene), "pad": "0.15", "fontname": FONT}
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
    """Yield the samples of the legend, in rows above everything else."""
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
    # Graphviz fills only what has this style.
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
    # A link that should not affect the layout must not push its target down either.
    if not link.weight:
        fields["constraint"] = "false"
    elif link.weight != 1:
        fields["weight"] = str(link.weight)
    if not link.has_head:
        fields["dir"] = "none"
    label = f", label={_label(link.lines)}" if link.lines else ""
    return f"  {_quoted(link.source)} -> {_quoted(link.target)} [{_attributes(**fields)}{label}]"


def _gap(scene: Scene) -> str:
    """Return the inches between ranks; rows of a grid leave room for ties, which run between them."""
    ties = sum(1 for link in scene.links if not link.has_head)
    if not scene.parts:
        return "0.1"
    return f"{min(0.6 + 0.5 * max(ties - 1, 0), 3.0):g}" if scene.rows else "0.36"


def _grid(scene: Scene) -> Iterator[str]:
    """Yield invisible links: they keep the boxes of a row side by side, and the rows below each other."""
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


__all__ = ["FONT", "SIZE", "part_items", "scene_dot"]
