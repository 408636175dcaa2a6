"""Hostile cases in real processes over gloo: every rank runs the judge beside its part of the model.

    for case in process_cases(): print(case, run_in_processes(case.source, case.script))

Ranks may read other data, or begin with other weights, which has to be refused. A case that does not end in time is raw:
a rank waits for ever.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tests.hostile.attack.generate import cases
from tests.hostile.generate import write
from tests.hostile.judge import FORBIDDEN, Outcome, Script, judge
from tests.hostile.recipes import MEDDLES, STORAGE, Recipe
from tests.ports import free_port

ROOT = Path(__file__).parents[2]
SECONDS = 150.0
PLAIN = Recipe("processes", "plain")
RANK = "int(__import__('os').environ.get('RANK', 0))"
LARGEST = 4  # ranks
BY_RANK = {  # a line of a drawn source -> what makes it differ between ranks
    "data": ("manual_seed(50 + step)", f"manual_seed(50 + step + 1000 * {RANK})"),
    "weights": ("manual_seed(3 + variant)", f"manual_seed(3 + variant + {RANK})"),
    "numbers": ("self.i = i", f"self.i = i + {RANK}"),
}


@dataclass(frozen=True)
class ProcessCase:
    name: str
    source: str
    script: Script

    def __str__(self) -> str:
        return f"{self.name} {self.script.mesh}"


def process_cases() -> Iterator[ProcessCase]:
    """Cases of recipes, those first that found most."""
    for recipe, mesh, more in _table():
        asked: dict[str, Any] = {"optimizer": "SGD", "steps": 4, "meddles": recipe.meddles, **more}
        source = write(recipe, 4 * mesh["d"])
        if recipe.name.startswith("weights by rank"):  # rank 0's are those of all
            source = source.replace("torch.manual_seed(variant)", f"torch.manual_seed({RANK})")
        yield ProcessCase(recipe.name, source, Script({"num_microbatches": 2, **mesh}, **asked))


def _table() -> list[tuple[Recipe, dict[str, Any], dict[str, Any]]]:
    block, clip = replace(PLAIN, name="one block", init=STORAGE["one block"]), "torch's clip"
    data, weights = replace(PLAIN, name="data by rank"), replace(PLAIN, name="weights by rank")
    clipped = replace(PLAIN, name="clip", meddles=MEDDLES["clip"])
    wrong_clip = replace(PLAIN, name=clip, meddles=(MEDDLES[clip][0], FORBIDDEN))
    by_rank: dict[str, Any] = {"data_by_rank": True, "meddles": ("", FORBIDDEN)}
    return [
        (data, {"t": 2, "p": 1, "d": 1}, by_rank),
        (data, {"t": 1, "p": 2, "d": 1}, by_rank),
        (block, {"t": 2, "p": 2, "d": 1}, {}),
        (PLAIN, {"t": 1, "p": 3, "d": 1}, {"evaluate": (1,)}),
        (wrong_clip, {"t": 1, "p": 2, "d": 1}, {}),
        (clipped, {"t": 2, "p": 2, "d": 1}, {}),
        (weights, {"t": 2, "p": 1, "d": 1}, {}),
        (weights, {"t": 1, "p": 1, "d": 2}, {}),
        (PLAIN, {"t": 1, "p": 4, "d": 1, "schedule": "zb_h1"}, {}),
        (replace(PLAIN, name="tied", init=STORAGE["tie"]), {"t": 1, "p": 2, "d": 2}, {"evaluate": (1,)}),
    ]


def drawn_cases(seed: int) -> Iterator[ProcessCase]:
    """Of the attack's cases those with few ranks, which pass their arguments by position; of three in five the ranks differ."""
    number = 0
    for case in cases(seed):
        size = size_of(case.script)
        is_plain = not any(name.startswith("call") for name in case.names) and not case.script.loss_fn
        if not (1 < size <= LARGEST and is_plain):
            continue
        # What rank 0 alone has (a state to load) and batches of other sizes are for threads.
        source, script = case.source, replace(case.script, reload={}, lazy=False, load="", evaluate=())
        kind = ["", "", *BY_RANK][number % 5]
        if kind:  # ranks that differ are found while they run
            source, script = source.replace(*BY_RANK[kind]), replace(script, meddles=("pass", ""))
        number += 1
        yield ProcessCase(f"{case}{f', other {kind} by rank' if kind else ''}", source, script)


def size_of(script: Script) -> int:
    return int(script.mesh["t"] * script.mesh["p"] * script.mesh["d"])


def run_in_processes(source: str, script: Script) -> Outcome:
    """Start all ranks, and hear what each found: the worst of them."""
    what = json.dumps({"source": source, "script": asdict(script)})
    port, processes = free_port(), []
    for rank in range(size_of(script)):
        env = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size_of(script))}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "tests.hostile.processes", what]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        processes.append(subprocess.Popen(command, env=env | {"PYTHONPATH": str(ROOT)}, cwd=ROOT, **streams))
    start, found = time.monotonic(), []
    try:
        for process in processes:
            out, errors = process.communicate(timeout=max(1.0, SECONDS - (time.monotonic() - start)))
            lines = [line for line in out.splitlines() if line.startswith('{"kind"')]
            last = errors.strip().splitlines()[-1:] or ["nothing was said"]
            nothing = Outcome("raw", f"{process.returncode}: {last[0]}")
            found.append(Outcome(**json.loads(lines[-1])) if lines else nothing)
    except subprocess.TimeoutExpired:
        found.append(Outcome("raw", f"rank {len(found)} did not end within {SECONDS:.0f} s"))
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    order = ["raw", "wrong", "refused", "void", "equal"]
    return min(found, key=lambda one: order.index(one.kind))


def main() -> None:
    """One rank of a case."""
    torch.set_num_threads(1)
    what = json.loads(sys.argv[1])
    tuples = {name: tuple(what["script"][name]) for name in ("meddles", "evaluate")}
    script = Script(**{**what["script"], **tuples})
    print(
        json.dumps(asdict(judge(what["source"], script, backend=None, rank=int(os.environ["RANK"])))),
        flush=True,
    )


if __name__ == "__main__":
    main()
