"""Whether the planner finds the optima of Subramanian et al.'s published code, and how fast it searches.

Each record of planning_problems.json is a problem (machine, fast domain, GPUs, model, tensor mode) with the optimum that the
authors' own code found, the nine runners-up, and how many candidates there are. The file derives from another repository
and is not part of this one: name the folder that has it. The rates are of one core: "searched" counts the candidates
whose seconds the search computed, over the whole search; "evaluated" every candidate of a problem, seconds and bytes, no bound.
Seconds are this process's own (`time.process_time`).

    python benchmarks/planner_problems.py --data DIR
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from autoptd.wings.planner.search import search, take

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.lib.subramanian import GPT3_1T, SYSTEMS, VIT_64K, SubramanianModel

SHAPES = {"GPT3-1T": GPT3_1T, "ViT-64K": VIT_64K}
NAMES = {"tp": "in_t1", "tp1": "in_t1", "tp2": "in_t2", "dp": "in_d", "pp": "in_p"}
TOLERANCE = 1e-6  # relative, of seconds


def model_of(record: dict[str, Any]) -> SubramanianModel:
    system = SYSTEMS[record["system"]].with_domain(record["nvs"])
    return SubramanianModel(
        SHAPES[record["model"]], system, record["n"], record["global_batch"], tensor=record["tp_mode"]
    )


def check(record: dict[str, Any]) -> dict[str, Any]:
    """One problem: whether all agrees, the worst relative difference of seconds, and how long the search took."""
    model = model_of(record)
    start = time.process_time()
    found = search(model, keep=10)
    searched = time.process_time() - start
    start = time.process_time()
    configs = model.configs()
    columns = take(configs.columns, np.flatnonzero(configs.reason < 0))
    where, added = model.variants(columns)
    candidates = {**take(columns, where), **added}
    model.seconds(candidates), model.memory_bytes(candidates)
    row = {
        "search_seconds": searched,
        "searched": found.evaluated,
        "all_seconds": time.process_time() - start,
    }
    row |= {"candidates": len(where), "count_agrees": len(where) == record["candidates"]}
    row |= {"feasible_agrees": (len(found) > 0) == record["feasible"], "plan_agrees": True, "worst": 0.0}
    if record["feasible"] and len(found):
        published = np.array([record["time_s"], *record["runner_up_times_s"]])
        row["worst"] = float(np.max(np.abs(found.seconds[: len(published)] / published - 1)))
        row["plan_agrees"] = _same_plan(
            record, {name: int(values[0]) for name, values in found.columns.items()}
        )
    return row


def _same_plan(record: dict[str, Any], best: dict[str, int]) -> bool:
    config = record["config"]
    degrees = (
        config.get("t1", config["t"]),
        config.get("t2", 1),
        config["p"],
        config["d"],
        config["microbatch"],
    )
    inside = {NAMES[axis]: width for axis, width in record["placement"].items()}
    same = degrees == tuple(best[name] for name in ("t1", "t2", "p", "d", "b"))
    return same and all(best[name] == width for name, width in inside.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder of planning_problems.json")
    parser.add_argument("--results", type=Path, help="a JSON file to write")
    arguments = parser.parse_args()
    file = arguments.data / "planning_problems.json" if arguments.data else None
    if file is None or not file.is_file():
        print("not run: --data DIR names the folder of planning_problems.json")
        return
    records = json.loads(file.read_text())["records"]
    rows = [check(record) for record in records]
    by_kind: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for record, row in zip(records, rows, strict=True):
        by_kind.setdefault((record["model"], record["tp_mode"]), []).append(row)
    print(
        f"{'model':8s} {'mode':6s} {'problems':>8s} {'agree':>6s} {'same plan':>9s} {'worst':>8s} {'slowest':>9s} candidates"
    )
    for (name, mode), group in sorted(by_kind.items()):
        print(f"{name:8s} {mode:6s} {_line(group)}")
    print(f"{'all':15s} {_line(rows)}")
    total, bounded = sum(row["candidates"] for row in rows), sum(row["searched"] for row in rows)
    evaluated, searched = sum(row["all_seconds"] for row in rows), sum(row["search_seconds"] for row in rows)
    print(
        f"evaluated {total / evaluated:,.0f} candidates/s, searched {bounded / searched:,.0f} candidates/s, one core"
    )
    if arguments.results:
        summary = {
            "problems": len(rows),
            "agree": sum(map(_agrees, rows)),
            "worst_relative": max(row["worst"] for row in rows),
            "slowest_search_seconds": max(row["search_seconds"] for row in rows),
            "candidates_per_second": total / evaluated,
            "searched_per_second": bounded / searched,
            "machine": platform.processor() or platform.machine(),
        }
        arguments.results.write_text(json.dumps(summary, indent=1) + "\n")


def _agrees(row: dict[str, Any]) -> bool:
    return row["feasible_agrees"] and row["count_agrees"] and row["worst"] <= TOLERANCE


def _line(rows: list[dict[str, Any]]) -> str:
    agree, same = sum(map(_agrees, rows)), sum(row["plan_agrees"] for row in rows)
    worst, slowest = max(row["worst"] for row in rows), max(row["search_seconds"] for row in rows)
    count = sum(row["candidates"] for row in rows)
    return f"{len(rows):8d} {agree:6d} {same:9d} {worst:8.1e} {1000 * slowest:6.0f} ms {count:10,d}"


if __name__ == "__main__":
    main()
