"""Print how readable each package is: `python -m tests.style [PLACE ...]`.

Columns: comprehensions and conditional expressions per 1,000 lines (nested and chained ones beside them),
comments per 100 code lines, share of code lines over 100 columns, lengths of functions, deepest nesting,
public docstrings that do not begin with a verb. With places named, these docstrings are listed below.
"""

from __future__ import annotations

import sys
from functools import reduce
from operator import add

from tests.style.measures import Measure, measure_places

HEADS = "place files lines compr/k nested cond/k chained comm/100 wide% median p90 p99 max depth no-verb"


def percentile(values: list[int], share: float) -> int:
    ordered = sorted(values) or [0]
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)]


def row(place: str, counts: Measure) -> list[str]:
    per_line = 1000 / max(counts.lines, 1)
    per_code = 100 / max(counts.code, 1)
    lengths = [percentile(counts.lengths, share) for share in (0.5, 0.9, 0.99, 1.0)]
    cells = [
        place,
        counts.files,
        counts.lines,
        f"{counts.comprehensions * per_line:.0f}",
        counts.nested,
        f"{counts.conditionals * per_line:.0f}",
        counts.chained,
        f"{counts.comments * per_code:.1f}",
        f"{counts.wide * per_code:.1f}",
        *lengths,
        max(counts.depths, default=0),
        f"{len(counts.without_verb)}/{counts.docstrings}",
    ]
    return [str(cell) for cell in cells]


def main(wanted: list[str]) -> None:
    places = measure_places()
    chosen = {place: places[place] for place in wanted or places}
    rows = [HEADS.split(), *(row(place, counts) for place, counts in chosen.items())]
    rows.append(row("all", reduce(add, chosen.values(), Measure())))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for cells in rows:
        print("  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True)))
    if wanted:
        for counts in chosen.values():
            print(*counts.without_verb, sep="\n")


main(sys.argv[1:])
