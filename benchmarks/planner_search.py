"""How fast the planner answers, by model size, GPUs and what may be chosen; nothing is trained and no GPU is needed.

For SC'21's GPTs (Narayanan et al., Table 1) from 1.7 billion to a trillion parameters, each on its own number of A100 and
batch, for the trillion with ever more to choose, and for one as large of 1536 layers: seconds to search, seconds of the whole
plan with its best few simulated, how many candidates there are, and how many are evaluated per second when all of them are
(seconds and bytes, no bound). Rates and seconds are this process's own (`time.process_time`): what else runs on the machine
does not count. Best of `--runs`.

    python benchmarks/planner_search.py       # a table, benchmarks/results/planner_search.json
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from autoptd.wings.planner.candidates import DefaultModel
from autoptd.wings.planner.plan import plan
from autoptd.wings.planner.request import make_request
from autoptd.wings.planner.search import search, take

ROOT = Path(__file__).parent.parent
FULL = {"recompute": "full", "precision": "bf16"}
SWITCHES = {"recompute": "any", "zero": "any", "precision": "bf16"}
PROBLEMS: list[
    tuple[str, tuple[int, int, int], int, int, dict[str, Any]]
] = [  # name, (L, h, a), GPUs, batch, constraints
    ("1.7 B", (24, 2304, 24), 32, 512, FULL),
    ("18.4 B", (40, 6144, 48), 256, 1024, FULL),
    ("145.6 B", (80, 12288, 96), 1536, 2304, FULL),
    ("1008 B", (128, 25600, 160), 3072, 3072, FULL),
    ("1008 B, every switch", (128, 25600, 160), 3072, 3072, SWITCHES),
    ("1008 B, every switch and placement", (128, 25600, 160), 3072, 3072, {**SWITCHES, "placement": "any"}),
    ("947 B, 1536 layers", (1536, 7168, 64), 3072, 3072, SWITCHES),
]


def measure(problem: tuple[str, tuple[int, int, int], int, int, dict[str, Any]], runs: int) -> dict[str, Any]:
    """One row of the table."""
    name, (layers, hidden, heads), gpus, batch, constraints = problem
    shape = {"layers": layers, "hidden": hidden, "heads": heads, "seq": 2048}
    asked = {"gpus": gpus, "cluster": "dgx-a100", "batch": batch, **constraints}
    request = make_request(shape, **asked)

    def evaluate_all() -> int:
        model = DefaultModel(request)
        configs = model.configs()
        columns = take(configs.columns, np.flatnonzero((configs.reason < 0) & request.only(configs.columns)))
        where, added = model.variants(columns)
        candidates = {**take(columns, where), **added}
        model.seconds(candidates), model.memory_bytes(candidates)
        return len(where)

    searched, found = best(lambda: search(DefaultModel(request), 10, request.only), runs)
    planned, answer = best(lambda: plan(shape, **asked) if len(found) else None, runs)
    evaluated, count = best(evaluate_all, runs)
    return {
        "problem": name,
        "gpus": gpus,
        "candidates": count,
        "timed": found.evaluated,
        "search_seconds": searched,
        "plan_seconds": planned,
        "candidates_per_second": count / evaluated,
        "best": answer.best.name if answer else "nothing fits",
    }


def best(call: Callable[[], Any], runs: int) -> tuple[float, Any]:
    """Least seconds of this process that a call takes, and what it returns."""
    least, result = np.inf, None
    for _ in range(runs):
        start = time.process_time()
        result = call()
        least = min(least, time.process_time() - start)
    return float(least), result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument(
        "--results", type=Path, default=ROOT / "benchmarks" / "results" / "planner_search.json"
    )
    arguments = parser.parse_args()
    rows = []
    print(
        f"{'problem':36s} {'GPUs':>5s} {'candidates':>10s} {'timed':>7s} {'search':>8s} {'plan':>8s} {'per second':>11s}  best"
    )
    for problem in PROBLEMS:
        row = measure(problem, arguments.runs)
        rows.append(row)
        times = f"{1000 * row['search_seconds']:5.0f} ms {1000 * row['plan_seconds']:5.0f} ms"
        counts = f"{row['gpus']:5d} {row['candidates']:10,d} {row['timed']:7,d}"
        print(f"{row['problem']:36s} {counts} {times} {row['candidates_per_second']:11,.0f}  {row['best']}")
    machine = {"python": platform.python_version(), "numpy": np.__version__, "machine": platform.machine()}
    arguments.results.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
