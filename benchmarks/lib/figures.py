"""Figures and tables of a paper, as Markdown, as JSON, and as small pictures without a plotting library.

A `Figure` is y over x for some series, with what the paper states of it in words, what ours shows, and whether the two agree. A
table is a list of rows, each a mapping with the same keys.

    write_report(folder, "paper", title, about, {"Table 1": (rows, note)}, [figure])     # paper.md, paper.json, paper/*.svg
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Column = dict[float, float | None]  # x -> y; None: does not fit in memory
Series = dict[str, Column]
Rows = list[dict[str, Any]]
COLORS = ("#2f6db3", "#c4572e", "#3f8f5b", "#8a5ab0", "#b08a2f", "#5a5a5a", "#c43e7a", "#2fa3a3", "#7a4a2f")


@dataclass(frozen=True)
class Figure:
    """One picture: y over x for some series.

    `paper` says what the paper states of it, `here` what ours shows, `agrees` whether that is the same ("yes", "no", "in part";
    "" where nothing is stated), `note` what was assumed because the text does not say it. `rows`: a table in the place
    of the one that the series give. `is_log`: the y axis is logarithmic.
    """

    name: str
    title: str
    x: str
    y: str
    series: Series
    paper: str
    here: str
    agrees: str = ""
    note: str = ""
    rows: Rows = dataclasses.field(default_factory=list)
    is_log: bool = False


def best(column: Column) -> float:
    """The x of the largest y."""
    return max((y, x) for x, y in column.items() if y is not None)[1]


def spread(column: Column) -> float:
    """The largest y over the smallest."""
    found = [y for y in column.values() if y is not None]
    return max(found) / min(found)


def verdict(*claims: bool) -> str:
    """Whether what the paper claims holds here as well."""
    return "yes" if all(claims) else "in part" if any(claims) else "no"


def text_table(rows: Rows) -> str:
    lines = ["| " + " | ".join(rows[0]) + " |", "|" + "---|" * len(rows[0])]
    return "\n".join(lines + ["| " + " | ".join(str(value) for value in row.values()) + " |" for row in rows])


def figure_rows(figure: Figure) -> Rows:
    """The figure's own rows, or its series side by side."""
    if figure.rows:
        return figure.rows
    xs = sorted({x for column in figure.series.values() for x in column})

    def cell(column: Column, x: float) -> str:
        value = column.get(x)
        return "" if x not in column else "does not fit" if value is None else f"{value:.3g}"

    return [
        {figure.x: f"{x:g}"} | {label: cell(column, x) for label, column in figure.series.items()} for x in xs
    ]


def picture(figure: Figure) -> str:
    """Lines over equally spaced x; y from zero, or logarithmic, to the largest."""
    xs = sorted({x for column in figure.series.values() for x in column})
    found = [y for column in figure.series.values() for y in column.values() if y is not None]
    low, top = min(found), max(found)

    def height(y: float) -> float:
        return math.log(y / low) / math.log(top / low) if figure.is_log else y / top

    scale = f"{low:.3g} to {top:.3g}, logarithmic" if figure.is_log else f"to {top:.3g}"
    lines = ['<svg xmlns="http://www.w3.org/2000/svg" width="540" height="320" font-family="sans-serif">']
    lines.append('<rect width="100%" height="100%" fill="white"/>')
    lines.append(f'<text x="10" y="20" font-size="13">{figure.title.replace("&", "and")}</text>')
    lines.append(
        f'<text x="10" y="38" font-size="11" fill="#555">{figure.y} ({scale}) against {figure.x}</text>'
    )
    lines.append('<line x1="40" x2="380" y1="270" y2="270" stroke="#999"/>')
    for i, x in enumerate(xs):
        lines.append(
            f'<text x="{50 + 320 * i / max(1, len(xs) - 1):.0f}" y="286" font-size="11">{x:g}</text>'
        )
    for number, (label, column) in enumerate(figure.series.items()):
        color = COLORS[number % len(COLORS)]
        places = [
            (50 + 320 * xs.index(x) / max(1, len(xs) - 1), 270 - 210 * height(y))
            for x, y in column.items()
            if y is not None
        ]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        lines.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>')
        lines += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>' for x, y in places]
        lines.append(
            f'<text x="392" y="{70 + 18 * number}" font-size="11" fill="{color}">{label[:24]}</text>'
        )
    return "\n".join([*lines, "</svg>"]) + "\n"


def overview(figures: Sequence[Figure]) -> Rows:
    """A row per figure: what is stated, what ours shows, whether that agrees."""
    return [
        {
            "figure": one.name,
            "of": one.title,
            "stated": one.paper,
            "here": one.here,
            "agrees": one.agrees or "nothing stated",
        }
        for one in figures
    ]


def replace_table(document: Path, maker: str, rows: Rows) -> None:
    """Put a table between the lines of a document that say who makes it."""
    begin, end = f"<!-- table: {maker} -->\n", "<!-- end of table -->\n"
    before, rest = document.read_text().split(begin)
    after = rest.split(end, 1)[1]
    document.write_text(f"{before}{begin}{text_table(rows)}\n{end}{after}")


def write_report(
    folder: Path,
    name: str,
    title: str,
    about: str,
    tables: Mapping[str, tuple[Rows, str]],
    figures: Sequence[Figure],
) -> None:
    """Write NAME.md with everything in it, NAME.json, and NAME/*.svg with one picture per figure."""
    (folder / name).mkdir(parents=True, exist_ok=True)
    parts = [f"# {title}", about]
    for label, (rows, note) in tables.items():
        parts += [f"## {label}", *([f"Assumed: {note}."] if note else []), text_table(rows)]
    for one in figures:
        parts += [f"## {one.name}: {one.title}", f"![{one.name}]({name}/{one.name}.svg)"]
        words = [
            f"Paper: {one.paper}.",
            f"Here: {one.here}.",
            *([f"Agrees: {one.agrees}."] if one.agrees else []),
        ]
        parts += [
            " ".join(words),
            *([f"Assumed: {one.note}."] if one.note else []),
            text_table(figure_rows(one)),
        ]
        (folder / name / f"{one.name}.svg").write_text(picture(one))
    record = {label: rows for label, (rows, _) in tables.items()} | {
        one.name: dataclasses.asdict(one) for one in figures
    }
    (folder / f"{name}.md").write_text("\n\n".join(parts) + "\n")
    (folder / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
