"""`python -m tests.fuzz --cases 5000 --minutes 60 --seed 1`: prints findings as runnable scripts, then the tally."""

from __future__ import annotations

import argparse
import sys
from contextlib import nullcontext
from pathlib import Path

from tests.fuzz.features import CHOICES
from tests.fuzz.plant import FAULTS, planted
from tests.fuzz.search import search


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description="Random decoders on random meshes."
    )
    parser.add_argument("--cases", type=int, default=5000, help="stop after so many")
    parser.add_argument("--minutes", type=float, default=10.0, help="stop after so long")
    parser.add_argument("--seed", type=int, default=0, help="the same seed draws the same cases")
    parser.add_argument("--folder", type=Path, default=Path("out/fuzz"), help="where findings are written")
    parser.add_argument(
        "--without", nargs="*", default=[], choices=CHOICES, help="features that are not drawn"
    )
    parser.add_argument("--plant", choices=FAULTS, help="plant a fault, to see that it is found")
    args = parser.parse_args()
    with planted(args.plant) if args.plant else nullcontext():
        tally = search(args.cases, args.minutes, args.seed, args.folder, without=args.without)
    print(tally.report())
    return 1 if tally.findings else 0


if __name__ == "__main__":
    sys.exit(main())
