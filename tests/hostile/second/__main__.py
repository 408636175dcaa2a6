"""`python -m tests.hostile.second --cases 400 --seed 5`: counts by kind, refusals, and what is wrong or raw."""

from __future__ import annotations

import argparse
import logging
import sys
import time
import warnings
from itertools import islice
from pathlib import Path

import torch

from tests.hostile.__main__ import Tally
from tests.hostile.second.generate import TABLES, cases


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.hostile.second", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--cases", type=int, default=400, help="stop after so many")
    parser.add_argument("--first", type=int, default=0, help="leave out so many")
    parser.add_argument("--seed", type=int, default=5, help="the same seed draws the same cases")
    parser.add_argument("--only", default="", choices=("", *TABLES), help="one kind")
    parser.add_argument("--minutes", type=float, default=1e9, help="stop after so long")
    parser.add_argument("--show", type=int, help="print the source of this case, and run it alone")
    parser.add_argument(
        "--folder", type=Path, default=Path("out/second"), help="where failing cases are written"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)  # torch logs whole graphs where it cannot trace
    warnings.simplefilter("ignore")
    if args.show is not None:
        case = next(islice(cases(args.seed, args.only), args.show, None))
        print(f"{case.source}\n# {case}\n# {case.run()}")
        return 0
    tally, start = Tally(args.folder), time.monotonic()
    for case in islice(cases(args.seed, args.only), args.first, args.cases):
        if time.monotonic() - start > 60 * args.minutes:
            break
        found = case.run()
        tally.add(case.kind, str(case), case.source, found)
        if found.kind in ("refused", "void"):
            print(f"{found.kind:7} {case}\n        {found.detail[:300]}", flush=True)
    print(tally.report(time.monotonic() - start))
    return 1 if tally.failed else 0


if __name__ == "__main__":
    sys.exit(main())
