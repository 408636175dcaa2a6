"""Run by `test_processes.py` as one of 4 ranks over gloo: one rank is killed in the middle of a step."""

from __future__ import annotations

import os
import signal
import sys

import autoptd
from autoptd.ir.actions import Action, parse
from tests.parity.models import batch, gpt


def main(victim: int, action: str) -> None:
    ids, targets = batch(8)
    share = (ids[:4], targets[:4])
    pm = autoptd.parallelize(gpt(2), p=2, d=2, num_microbatches=4, example_inputs=share, timeout=20)
    pm.step(*share)
    if int(os.environ["RANK"]) == victim:
        executor = pm._ranks.here[0].executor  # type: ignore[union-attr]
        right = executor._do[parse(action).kind]

        def die(now: Action) -> None:
            if str(now) == action:
                os.kill(os.getpid(), signal.SIGKILL)
            right(now)

        executor._do[parse(action).kind] = die
    pm.step(*share)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
