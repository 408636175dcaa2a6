"""`python -m tests.hostile --cases 300 --seed 7`: counts by family, refusals by fact, and every case that is wrong or raw."""

from __future__ import annotations

import argparse
import logging
import re
import sys
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from tests.hostile.generate import cases, run
from tests.hostile.judge import Outcome
from tests.hostile.processes import process_cases, run_in_processes
from tests.hostile.recipes import FAMILIES

KINDS = ("equal", "refused", "void", "wrong", "raw")


def drive(
    name: str,
    doc: str,
    seed: int,
    count: int,
    cases_of: Callable[..., Iterable[Any]],
    run: Callable[[Any], Outcome],
    kinds: Iterable[str] = (),
    in_processes: Callable[[int], Iterable[Any]] | None = None,
) -> int:
    """Run the cases that `cases_of(seed)` draws, or of `cases_of(seed, kind)` one kind: the main of a generator."""
    parser = argparse.ArgumentParser(prog=f"python -m tests.{name}", description=doc.splitlines()[0])
    parser.add_argument("--cases", type=int, default=count, help="stop after so many")
    parser.add_argument("--first", type=int, default=0, help="leave out so many")
    parser.add_argument("--every", type=int, default=1, help="then every so many-th")
    parser.add_argument("--seed", type=int, default=seed, help="the same seed draws the same cases")
    parser.add_argument("--minutes", type=float, default=1e9, help="stop after so long")
    parser.add_argument("--show", type=int, help="print the source of this case, and run it alone")
    if kinds:
        parser.add_argument("--only", default="", choices=("", *kinds), help="one kind")
    if in_processes:
        parser.add_argument("--processes", type=int, default=0, help="then so many in real processes")
    folder = Path("out") / name.rpartition(".")[2]
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
    for case in islice(drawn, args.first, args.cases, args.every):
        if time.monotonic() - start > 60 * args.minutes:
            break
        tally.add(getattr(case, "kind", "whole"), case, run(case))
    for case in islice(in_processes(args.seed), args.processes) if in_processes else ():
        tally.add("processes", case, run_in_processes(case.source, case.script))
    print(tally.report(time.monotonic() - start))
    return 1 if tally.failed else 0


class Tally:
    """Counts of outcomes; failing cases are written to `folder` as they are found."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.outcomes: dict[str, Counter[str]] = defaultdict(Counter)
        self.facts: dict[str, Counter[str]] = defaultdict(Counter)
        self.failed: list[str] = []

    def add(self, family: str, case: Any, found: Outcome) -> None:
        self.outcomes[family][found.kind] += 1
        if found.kind in ("refused", "void"):
            self.facts[found.kind][re.sub(r"[0-9][0-9.e+-]*", "N", found.detail.splitlines()[0])[:150]] += 1
            print(f"{found.kind:7} {case}\n        {found.detail[:300]}", flush=True)
        if found.kind in ("wrong", "raw"):
            self.failed.append(str(case))
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self.folder / f"{found.kind}_{len(self.failed):03}.py"
            path.write_text(f'"""{case}\n\n{found.detail}\n"""\n\n{case.source}\n'.replace("\\", "/"))
            print(f"{found.kind.upper():5}  {case}\n       {found.detail[:300]}\n       {path}", flush=True)

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
    sys.exit(drive("hostile", __doc__, 7, 300, cases, run, FAMILIES, lambda seed: process_cases()))
