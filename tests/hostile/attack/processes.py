"""Drawn cases as real processes over gloo: every rank runs the judge beside its part of the model.

    python -m tests.hostile.attack.processes --cases 10 --seed 11

Ranks that read other data than their replica does, or begin with other weights, are to be refused: nothing else is right.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, replace

import torch

from tests.hostile.attack.generate import Case, cases
from tests.hostile.attack.judge import Script, judge
from tests.hostile.oracle import Outcome
from tests.hostile.processes import worst_of_ranks

LARGEST = 4  # ranks
BY_RANK = {  # a line of the source -> what makes it differ between ranks, and has to be refused
    "data": (
        "manual_seed(50 + step)",
        "manual_seed(50 + step + 1000 * int(__import__('os').environ['RANK']))",
    ),
    "weights": (
        "manual_seed(3 + variant)",
        "manual_seed(3 + variant + int(__import__('os').environ['RANK']))",
    ),
    "numbers": ("self.i = i", "self.i = i + int(__import__('os').environ['RANK'])"),
}


def process_cases(seed: int) -> Iterator[Case]:
    """Of all cases those with few ranks, which pass their arguments by position."""
    for case in cases(seed):
        size = case.script.mesh["t"] * case.script.mesh["p"] * case.script.mesh["d"]
        is_plain = not any(name.startswith("call") for name in case.names) and not case.script.loss_fn
        if 1 < size <= LARGEST and is_plain:
            # What rank 0 alone has (a state to load) and batches of other sizes are for threads.
            yield replace(case, script=replace(case.script, reload={}, lazy=False, load="", evaluate=0))


def run_in_processes(source: str, script: Script) -> Outcome:
    """Start all ranks, and hear what each found: the worst of them."""
    size = script.mesh["t"] * script.mesh["p"] * script.mesh["d"]
    what = json.dumps({"source": source, "script": asdict(script)})
    return worst_of_ranks(["tests.hostile.attack.processes", "--one", what], size)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=10)
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--minutes", type=float, default=1e9)
    parser.add_argument("--one", help="one rank of a case")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    if args.one:
        what = json.loads(args.one)
        print(json.dumps(asdict(judge(what["source"], Script(**what["script"]), backend=None))), flush=True)
        return 0
    start, failed = time.monotonic(), 0
    for number, case in zip(range(args.cases), process_cases(args.seed), strict=False):
        if time.monotonic() - start > 60 * args.minutes:
            break
        source, kind = case.source, ["", "", *BY_RANK][number % 5]
        if kind:
            source = source.replace(*BY_RANK[kind])
        found = run_in_processes(source, case.script)
        if kind and "RuntimeFault" in found.detail:  # ranks that differ are found while they run
            found = replace(found, kind="refused")
        failed += found.kind in ("raw", "wrong")
        print(
            f"{found.kind:8} {kind} by rank: " if kind else f"{found.kind:8} ",
            case,
            found.detail[:300],
            flush=True,
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
