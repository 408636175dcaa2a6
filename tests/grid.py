"""Every schedule on every mesh, against the model on one device: `python -m tests.grid`, or a covering part of it in the tests.

A case is (model, schedule, t, p, d, v, m, sequence parallel or not). Its parity is that of `autoptd.verify`: loss, gradients
and updated parameters in float64. A case that cannot be is to be a PlanError whose remedy names settings that work; those
are then run instead.

    python -m tests.grid --part 0/2 & python -m tests.grid --part 1/2      # two halves, side by side
    python -m tests.grid --only schedule=zbv model=unet

The tests run `covering()`: for every two factors every pair of their values that goes together, in as few cases as a greedy
choice finds (of the cases that cover most pairs not yet seen, the one with the fewest ranks).
"""

from __future__ import annotations

import argparse
import itertools
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import nn

import autoptd
from autoptd import trace
from autoptd.errors import InternalError, PlanError
from autoptd.ir.actions import SCHEDULES
from tests import traces
from tests.parity.models import batch, encoder_decoder, gpt, shared_block, source_batch, unet
from tests.parity.rotary import llama, neox

ROWS = 2  # of a microbatch
STEPS = 2
MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt": lambda: gpt(6, heads=2, width=16),
    "llama": llama,
    "neox": neox,
    "unet": lambda: unet(3),
    "shared": lambda: shared_block(6),
    "encoder-decoder": lambda: encoder_decoder(3),
}
FACTORS: dict[str, tuple[Any, ...]] = {
    "model": tuple(MODELS),
    "schedule": tuple(SCHEDULES),
    "t": (1, 2),
    "p": (1, 2, 3, 4),
    "d": (1, 2),
    "v": (1, 2, 3),
    "m": (1, 3, 4, 5, 8),
    "sp": (False, True),
}


class Case(NamedTuple):
    model: str
    schedule: str
    t: int
    p: int
    d: int
    v: int
    m: int
    sp: bool = False

    def __str__(self) -> str:
        mesh = f"t{self.t}p{self.p}d{self.d}v{self.v}m{self.m}"
        return f"{self.model}-{self.schedule}-{mesh}" + ("-sp" if self.sp else "")


def grid() -> list[Case]:
    """All cases but those whose v the schedule does not have, several chunks on one pipeline rank, and sequence parallelism
    on one tensor rank.
    """
    every = [Case(*values) for values in itertools.product(*FACTORS.values())]
    return [case for case in every if fits(case)]


def misfits() -> list[Case]:
    """The cases that are left, one model and batch of them: they are to be refused."""
    few = dict.fromkeys(
        Case(*values)._replace(model="gpt", m=4, sp=False) for values in itertools.product(*FACTORS.values())
    )
    return [case for case in few if not fits(case)]


def fits(case: Case) -> bool:
    return (
        SCHEDULES[case.schedule] in (0, case.v)
        and (case.v == 1 or case.p > 1)
        and (case.t > 1 or not case.sp)
    )


def covering() -> list[Case]:
    """Few cases in which all pairs of values occur that occur in the grid."""
    left = {pair for case in grid() for pair in _pairs(case)}
    cases = {case: set(_pairs(case)) for case in sorted(grid(), key=lambda case: case.t * case.p * case.d)}
    chosen = []
    while left:
        best = max(cases, key=lambda case: len(cases[case] & left))  # the first of the largest
        chosen.append(best)
        left -= cases.pop(best)
    return chosen


def _pairs(case: Case) -> list[tuple[Any, ...]]:
    return list(itertools.combinations(zip(FACTORS, case, strict=True), 2))


def _traced(case: Case) -> tuple[str, int, int]:
    return case.model, case.m, case.d


def run(case: Case) -> None:
    """Verify a case; raises what verify raises."""
    rows = ROWS * case.m * case.d
    inputs = (source_batch(rows), *batch(rows)) if case.model == "encoder-decoder" else batch(rows)
    mesh = {"t": case.t, "p": case.p, "d": case.d, "v": case.v}
    schedule = {"schedule": case.schedule, "num_microbatches": case.m}
    schedule["p2p"] = "direct" if case.m % 2 else "scatter_gather"
    schedule["sequence_parallel"] = case.sp
    autoptd.verify(MODELS[case.model](), **mesh, **schedule, example_inputs=inputs, steps=STEPS)


def settings(error: PlanError, case: Case) -> list[Case]:
    """The cases that a refusal's remedy offers: "num_microbatches=4 or 8", "v=1, or p >= 2 with schedule='interleaved'"."""
    found, last = [], ""
    for text in re.split(r",? or |, ", error.remedy):
        pairs = re.findall(r"(num_microbatches|schedule|v|p|m)(?: >= |=)'?(\w+)", text)
        pairs = pairs or ([(last, text)] if last and text.isdigit() else [])
        values = {"m" if key == "num_microbatches" else key: one for key, one in pairs}
        if values:
            last = pairs[-1][0]
            found.append(
                case._replace(**{key: int(one) if one.isdigit() else one for key, one in values.items()})
            )
    return found


class Tally:
    """What became of the cases so far; none is run twice."""

    def __init__(self) -> None:
        self.seen: dict[Case, Exception | None] = {}
        self.outcomes: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()

    def verify(self, case: Case) -> Exception | None:
        """What verifying the case raises, if anything."""
        if case not in self.seen:
            try:
                run(case)
                self.seen[case] = None
            except Exception as error:
                self.seen[case] = error
        return self.seen[case]

    def count(self, case: Case) -> str:
        """Run a case; return what is wrong with it: nothing if it passes, or is refused with settings that all pass."""
        error = self.verify(case)
        if error is None:
            self.outcomes["passed"] += 1
            return ""
        if isinstance(error, PlanError):
            offered = settings(error, case)
            wrong = [f"{one} raises {found}" for one in offered if (found := self.verify(one))]
            if offered and not wrong:
                self.outcomes["refused"] += 1
                self.refusals[f"{error.site}: {error.fact}"] += 1
                return ""
            error = InternalError("remedy", f"of {error}: {'; '.join(wrong) or 'names no settings'}")
        self.outcomes["failed"] += 1
        return f"{type(error).__name__}: {error}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.grid", description=__doc__.splitlines()[0])
    parser.add_argument("--part", default="0/1", help="I/N: every N-th case from the I-th on")
    parser.add_argument("--only", nargs="*", default=[], help="FACTOR=VALUE: cases with these values")
    parser.add_argument("--minutes", type=float, default=1e9, help="stop after so long")
    args = parser.parse_args()
    torch.set_num_threads(1)
    part, parts = map(int, args.part.split("/"))
    cases = grid() + misfits()
    for name, value in (one.split("=") for one in args.only):
        cases = [case for case in cases if str(getattr(case, name)) == value]
    random.Random(0).shuffle(cases)  # so that a part, or a run cut short, says something about all
    cases = cases[part::parts]
    # Cases of one model and batch follow each other: they share a trace.
    first = {case: number for number, case in reversed(list(enumerate(map(_traced, cases))))}
    cases.sort(key=lambda case: first[_traced(case)])
    start, tally = time.monotonic(), Tally()
    with mock.patch.object(trace, "capture", traces.capture):
        for number, case in enumerate(cases):
            if time.monotonic() - start > 60 * args.minutes:
                print(f"stopped: {len(cases) - number} cases were not run")
                break
            if wrong := tally.count(case):
                print(f"FAILED {case}\n       {wrong}", flush=True)
            if number % 50 == 49:
                print(f"{time.monotonic() - start:6.0f} s  {dict(tally.outcomes)}", flush=True)
    print(f"{tally.outcomes.total()} cases in {time.monotonic() - start:.0f} s: {dict(tally.outcomes)}")
    for fact, count in tally.refusals.most_common():
        print(f"  refused {count:5}  {fact}")
    return 1 if tally.outcomes["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
