"""`python -m tests.hostile --cases 300 --seed 7`: counts by family, refusals by fact, and every case that is wrong or raw."""

from __future__ import annotations

import argparse
import logging
import re
import sys
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from tests.hostile.generate import cases, run
from tests.hostile.oracle import Outcome
from tests.hostile.processes import process_cases, run_in_processes

KINDS = ("equal", "refused", "void", "wrong", "raw")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.hostile", description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=300, help="stop after so many")
    parser.add_argument("--seed", type=int, default=7, help="the same seed draws the same cases")
    parser.add_argument("--minutes", type=float, default=1e9, help="stop after so long")
    parser.add_argument("--only", default="", help="one family")
    parser.add_argument("--part", default="0/1", help="I/N: every N-th case from the I-th on")
    parser.add_argument("--processes", type=int, default=0, help="so many of the cases in real processes too")
    parser.add_argument("--show", type=int, help="print the source of this case, and run it alone")
    parser.add_argument(
        "--folder", type=Path, default=Path("out/hostile"), help="where failing cases are written"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)  # torch logs whole graphs where it cannot trace
    if args.show is not None:
        case = next(islice(cases(args.seed, args.only), args.show, None))
        print(f"{case.source}\n# {case}\n# {run(case)}")
        return 0
    part, parts = map(int, args.part.split("/"))
    tally = Tally(args.folder)
    start = time.monotonic()
    for case in islice(cases(args.seed, args.only), part, args.cases, parts):
        if time.monotonic() - start > 60 * args.minutes:
            break
        tally.add(case.recipe.family, str(case), case.source, run(case))
    for name, source, found in run_all_in_processes(args.processes):
        tally.add("processes", name, source, found)
    print(tally.report(time.monotonic() - start))
    return 1 if tally.failed else 0


def drive(
    name: str, doc: str, seed: int, count: int, cases_of: Any, run: Any, kinds: Iterable[str] = ()
) -> int:
    """Run the cases that `cases_of(seed)` draws, or of `cases_of(seed, kind)` one kind; the main of a further generator."""
    parser = argparse.ArgumentParser(prog=f"python -m tests.hostile.{name}", description=doc.splitlines()[0])
    parser.add_argument("--cases", type=int, default=count, help="stop after so many")
    parser.add_argument("--first", type=int, default=0, help="leave out so many")
    parser.add_argument("--seed", type=int, default=seed, help="the same seed draws the same cases")
    parser.add_argument("--minutes", type=float, default=1e9, help="stop after so long")
    parser.add_argument("--show", type=int, help="print the source of this case, and run it alone")
    if kinds:
        parser.add_argument("--only", default="", choices=("", *kinds), help="one kind")
    folder = Path("out") / name
    parser.add_argument("--folder", type=Path, default=folder, help="where failing cases are written")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)  # torch logs whole graphs where it cannot trace
    warnings.simplefilter("ignore")
    drawn = cases_of(args.seed, args.only) if kinds else cases_of(args.seed)
    if args.show is not None:
        case = next(islice(drawn, args.show, None))
        print(f"{case.source}\n# {case}\n# {run(case)}")
        return 0
    tally, start = Tally(args.folder), time.monotonic()
    for case in islice(drawn, args.first, args.cases):
        if time.monotonic() - start > 60 * args.minutes:
            break
        found = run(case)
        tally.add(getattr(case, "kind", "whole"), str(case), f"{case.source}\n# {case}\n", found)
        if found.kind in ("refused", "void"):
            print(f"{found.kind:7} {case}\n        {found.detail[:300]}", flush=True)
    print(tally.report(time.monotonic() - start))
    return 1 if tally.failed else 0


def run_all_in_processes(count: int) -> Iterable[tuple[str, str, Outcome]]:
    for case in islice(process_cases(), count):
        yield case.name, case.source, run_in_processes(case)


class Tally:
    """Counts of outcomes; failing cases are written to `folder` as they are found."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.outcomes: dict[str, Counter[str]] = defaultdict(Counter)
        self.facts: dict[str, Counter[str]] = defaultdict(Counter)
        self.failed: list[str] = []

    def add(self, family: str, name: str, source: str, found: Outcome) -> None:
        self.outcomes[family][found.kind] += 1
        if found.kind in ("refused", "void"):
            self.facts[found.kind][re.sub(r"[0-9][0-9.e+-]*", "N", found.detail.splitlines()[0])[:150]] += 1
        if found.kind in ("wrong", "raw"):
            self.failed.append(name)
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self.folder / f"{found.kind}_{len(self.failed):03}.py"
            path.write_text(f'"""{name}\n\n{found.detail}\n"""\n\n{source}'.replace("\\", "/"))
            print(f"{found.kind.upper():5}  {name}\n       {found.detail[:300]}\n       {path}", flush=True)

    def report(self, seconds: float) -> str:
        total = sum(self.outcomes.values(), Counter[str]())
        lines = [
            f"{total.total()} cases in {seconds:.0f} s: "
            + ", ".join(f"{total[kind]} {kind}" for kind in KINDS)
        ]
        for family, counts in self.outcomes.items():
            lines.append(f"  {family:10} " + "  ".join(f"{counts[kind]:4} {kind}" for kind in KINDS))
        for kind, facts in self.facts.items():
            lines += [f"  {kind:8} {count:4}  {fact}" for fact, count in facts.most_common()]
        return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
