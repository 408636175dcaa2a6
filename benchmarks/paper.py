"""The tables and figures of two papers from the performance models, with the papers' values where they state them as numbers.

- Narayanan et al., SC'21: tables 1 and 2, the two training times, figures 6 to 8 and 11 to 18, by the planner's cost model.
- Subramanian et al., arXiv:2410.00273: figures 1 to 5, by their own (`benchmarks/lib/subramanian`).

No value was read off a picture: a figure is compared with what is stated of it in words or numbers, "Agrees" says whether that
holds here as well, and "Assumed" names what the text that we have does not say.

    python benchmarks/paper.py      # benchmarks/results/paper.md, paper.json, paper/*.svg, and the table in docs/planner.md
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.lib import sc21_figures, sc21_tables, subramanian_figures  # noqa: E402
from benchmarks.lib.figures import overview, replace_table, text_table, write_report  # noqa: E402

ABOUT = """SC'21's tables and figures run on machines/dgx-a100.toml with the software of 2021 (its one
factor included), fp16, full recomputation unless a figure is about that, boundaries in t pieces unless a figure is about that;
those of Subramanian et al. with their own cost model and machines. No value was read off a picture. "Agrees": whether
what the paper states in words or numbers holds here too, numbers within a fifth; "Assumed": what its text does not say."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument(
        "--doc", type=Path, default=ROOT / "docs" / "planner.md", help="where the overview goes"
    )
    args = parser.parse_args()
    tables = {}
    for name, (make, note) in sc21_tables.TABLES.items():
        tables[name] = (make(), note)
        print(f"## {name}", text_table(tables[name][0]), sep="\n", flush=True)
    figures = []
    for draw in (*sc21_figures.FIGURES, *subramanian_figures.FIGURES):
        figures.append(draw())
        one = figures[-1]
        print(
            f"{one.name}: paper: {one.paper}. Here: {one.here}. Agrees: {one.agrees or 'nothing stated'}.",
            flush=True,
        )
    title = "Tables and figures of SC'21 and of Subramanian et al., predicted"
    write_report(args.out, "paper", title, ABOUT, tables, figures)
    replace_table(args.doc, "benchmarks/paper.py", overview(figures))


if __name__ == "__main__":
    main()
