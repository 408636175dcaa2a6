"""A few hostile cases in real processes over gloo: every rank runs the oracle of `oracle.py` beside its part of the model.

    for case in process_cases(): print(case.name, run_in_processes(case))

Ranks may read other data, or begin with other weights. A case that does not end in time is raw: somebody waits for ever.
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

from tests.hostile.generate import write
from tests.hostile.oracle import FORBIDDEN, Outcome, Setting, judge
from tests.hostile.recipes import MEDDLES, STORAGE, Recipe
from tests.ports import free_port

ROOT = Path(__file__).parents[2]
SECONDS = 150.0
PLAIN = Recipe("processes", "plain")
SEEDED = "torch.manual_seed(variant)"


@dataclass(frozen=True)
class ProcessCase:
    name: str
    source: str
    setting: Setting

    @property
    def size(self) -> int:
        return int(self.setting.mesh["t"] * self.setting.mesh["p"] * self.setting.mesh["d"])


def process_cases() -> Iterator[ProcessCase]:
    """The cases, those first that found most."""
    for recipe, mesh, more in _table():
        setting = Setting(**{"mesh": {"num_microbatches": 2, **mesh}, "meddles": recipe.meddles, **more})
        rows = 4 * mesh["d"]
        source = write(recipe, rows)
        if recipe.name.startswith("weights by rank"):  # rank 0's are those of all
            source = source.replace(SEEDED, "import os; torch.manual_seed(int(os.environ.get('RANK', 0)))")
        yield ProcessCase(f"{recipe.name} {mesh} {more}", source, setting)


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
        (PLAIN, {"t": 1, "p": 3, "d": 1}, {"evaluate": True}),
        (wrong_clip, {"t": 1, "p": 2, "d": 1}, {}),
        (clipped, {"t": 2, "p": 2, "d": 1}, {}),
        (weights, {"t": 2, "p": 1, "d": 1}, {}),
        (weights, {"t": 1, "p": 1, "d": 2}, {}),
        (PLAIN, {"t": 1, "p": 4, "d": 1, "schedule": "zb_h1"}, {}),
        (replace(PLAIN, name="tied", init=STORAGE["tie"]), {"t": 1, "p": 2, "d": 2}, {"evaluate": True}),
    ]


def run_in_processes(case: ProcessCase) -> Outcome:
    """Start all ranks, and hear what each found: the worst of them."""
    what = json.dumps({"source": case.source, "setting": asdict(case.setting)})
    return worst_of_ranks(["tests.hostile.processes", what], case.size)


def worst_of_ranks(module: list[str], size: int) -> Outcome:
    """Start `python -m module ...` as `size` ranks, and hear what each found: a line of JSON."""
    port, processes = free_port(), []
    for rank in range(size):
        env = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
        env |= {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
        }
        command = [sys.executable, "-m", *module]
        processes.append(
            subprocess.Popen(
                command, env=env, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
    start, found = time.monotonic(), []
    try:
        for process in processes:
            out, errors = process.communicate(timeout=max(1.0, SECONDS - (time.monotonic() - start)))
            lines = [line for line in out.splitlines() if line.startswith('{"kind"')]
            last = errors.strip().splitlines()[-1:] or ["nothing was said"]
            found.append(
                Outcome(**json.loads(lines[-1]))
                if lines
                else Outcome("raw", f"{process.returncode}: {last[0]}")
            )
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
    what = json.loads(sys.argv[1])
    setting = Setting(**{**what["setting"], "meddles": tuple(what["setting"]["meddles"])})
    rank = int(os.environ["RANK"])
    found = judge(what["source"], setting, backend=None, rank=rank)
    print(json.dumps(asdict(found)), flush=True)


if __name__ == "__main__":
    main()
