"""Kill a rank in the middle of a step, once for every case given, and print as JSON how each of the other ranks ended.

Or stop it by SIGSTOP: its connections stay open, and where it hosts the store that answers no more.

Ranks are real processes over gloo. They are forked here: torch is imported once, and a mesh compiled once for all its cases,
which run side by side. `seconds` are those that a rank lived on after the kill.

    python die_in_a_step.py '[[{"p": 2}, 1, "B1.1", "SIGKILL"], [{"p": 2}, 0, "SEND_F0.2>1", "SIGSTOP"]]'
    # [{"0": {"code": 1, "seconds": 2.7, "error": "RuntimeFault: ..."}}, {"1": ...}]
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from autoptd.compiler.driver import compile_program
from autoptd.ir.actions import parse
from autoptd.model.parallel_model import ParallelModel
from autoptd.options import Options, RankOptions, make_options
from autoptd.program.program import Program
from autoptd.runtime.params.parameters import RankParameters
from tests.forks import fork_rank
from tests.parity.models import batch, gpt
from tests.ports import free_port

# Seconds; of a launch in which a rank is stopped, as the others wait for as long.
TIMEOUT, TIMEOUT_OF_STOPPED = 20.0, 6.0
UPDATE = "update"
Batch = tuple[torch.Tensor, ...]


def compiled(mesh: dict[str, Any]) -> tuple[Program, Options, Batch]:
    """The program of a mesh, with all kinds of actions in it, and a replica's batch."""
    options = make_options(
        **mesh, num_microbatches=4, delay_wgrad_compute="after_b", backend="gloo", timeout=TIMEOUT
    )
    share = batch(4)
    return compile_program(gpt(2), options, share, {}, replicas=1, check=False), options, share


def run_rank(
    made: tuple[Program, Options, Batch], is_victim: bool, action: str, how: str, folder: Path
) -> None:
    """Two steps; the victim is killed at `action` of the second, or where it would publish an update before it."""
    program, options, share = made
    if how == "SIGSTOP":
        options = replace(options, ranks=RankOptions(timeout=TIMEOUT_OF_STOPPED))
    pm = ParallelModel(program, options, gpt(2).state_dict())
    pm.step(*share)

    def die(*_: object) -> None:
        (folder / "killed").write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.Signals[how])

    if action == UPDATE:
        if is_victim:
            RankParameters.publish = die  # type: ignore[method-assign]
        pm.optimizer(torch.optim.SGD, lr=0.1).step()
    elif is_victim:
        executor = pm.run.ranks.here[0].executor  # type: ignore[union-attr]
        right = executor._do[parse(action).kind]
        executor._do[parse(action).kind] = lambda now: die() if str(now) == action else right(now)
    pm.step(*share)


def fork_ranks(
    made: tuple[Program, Options, Batch], victim: int, action: str, how: str, folder: Path
) -> dict[int, int]:
    """Start the ranks of one case; returns rank -> process id. Each writes to `folder` when it ends, and what it raises."""
    folder.mkdir()
    port, size, pids = free_port(), made[0].mesh.size, {}
    for rank in range(size):

        def ends(error: str, rank: int = rank) -> None:
            (folder / str(rank)).write_text(f"{time.monotonic()} {error or 'none'}")

        work = partial(run_rank, made, rank == victim, action, how, folder)
        pids[rank] = fork_rank(rank, size, port, work, 100, ends)
    return pids


def main(cases: list[Any]) -> None:
    programs = {str(mesh): compiled(mesh) for mesh in [case[0] for case in cases]}
    with tempfile.TemporaryDirectory() as root:
        folders = [Path(root) / str(number) for number in range(len(cases))]
        started = [
            fork_ranks(programs[str(mesh)], victim, action, how, folder)
            for (mesh, victim, action, how), folder in zip(cases, folders, strict=True)
        ]
        results = []
        for (_, victim, _, _), folder, pids in zip(cases, folders, started, strict=True):
            others = {rank: pid for rank, pid in pids.items() if rank != victim}
            codes = {rank: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for rank, pid in others.items()}
            # One that is stopped does not end by itself; of one that ended, the code stays what it is.
            os.kill(pids[victim], signal.SIGKILL)
            if os.waitstatus_to_exitcode(os.waitpid(pids[victim], 0)[1]) != -signal.SIGKILL:
                raise RuntimeError(f"rank {victim} was not killed: {(folder / str(victim)).read_text()}")
            killed = float((folder / "killed").read_text())
            ends = {rank: (folder / str(rank)).read_text().split(" ", 1) for rank in codes}
            results.append(
                {
                    rank: {
                        "code": codes[rank],
                        "seconds": float(ends[rank][0]) - killed,
                        "error": ends[rank][1],
                    }
                    for rank in codes
                }
            )
    print(json.dumps(results))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
