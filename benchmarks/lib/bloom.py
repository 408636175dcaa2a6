"""The sweep made before BLOOM-176B's training, predicted: seconds, memory, and what ran out of memory.

Its rows derive from another repository (bigscience-workshop/bigscience, chronicles-prequel.md) and are read from a folder.
`find` gives a cluster by name and software, with or without the software's factor.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from autoptd.wings.planner.cluster import Cluster
from autoptd.wings.planner.predict import Prediction, predict
from benchmarks.lib.points import Point, Row, load

FILE = "bloom_sweep_part.json"
FIRST_DAY = "02-20"
GB, MIB_PER_GB = 1e9, 1.0486  # the sweep's GB are thousands of MiB, as nvidia-smi shows them


def is_of_the_first_day(point: Point) -> bool:
    return point.name.startswith(FIRST_DAY)


def sweep_rows(folder: Path) -> list[Row]:
    """The sweep without rows that its transcriber marked as doubtful or as copies."""
    rows = load(folder, FILE)["rows"]
    return [row for row in rows if "duplicate_of_line" not in row and "quality" not in row]


def prediction(row: Row, find: Callable[..., Cluster]) -> Prediction:
    is_bf16 = row["date"] >= "02-28"
    cluster = find("jean-zay-a100", f"megatron-deepspeed-{'bf16-' if is_bf16 else ''}2022")
    rows = row["d"] * row["microbatch"]
    shape = {name: row[name] for name in ("layers", "hidden")}
    shape |= {"heads": row["heads"] or (96 if row["hidden"] == 14400 else 64), "seq": 2048, "vocab": 250880}
    keywords = {name: row[name] for name in ("t", "p", "d", "microbatch")} | {
        "batch": row["batch"] // rows * rows
    }
    precision = "bf16" if is_bf16 else "fp16"
    return predict(shape, cluster, **keywords, recompute="full", zero=1, precision=precision)


def seconds(find: Callable[..., Cluster], folder: Path) -> list[Point]:
    """The sweep before BLOOM-176B: seconds of an iteration."""
    timed = [row for row in sweep_rows(folder) if row["sec_per_iter"]]
    return [Point(name_of(row), row["sec_per_iter"], prediction(row, find).step_seconds) for row in timed]


def memory(find: Callable[..., Cluster], folder: Path) -> list[Point]:
    """The sweep's memory, GB of the fullest of its first and last nodes."""
    rows = [row for row in sweep_rows(folder) if row["mem_gb"]]
    return [
        Point(name_of(row), row["mem_gb"] * MIB_PER_GB, max(prediction(row, find).memory) / GB)
        for row in rows
    ]


def out_of_memory(find: Callable[..., Cluster], folder: Path) -> dict[str, list[str]]:
    """Which cases ran out of memory, which of them the model says do not fit, and which others it says that of."""
    rows = [row for row in sweep_rows(folder) if row["sec_per_iter"] or row["oom"]]
    refused = {name_of(row) for row in rows if not prediction(row, find).fits}
    really = {name_of(row) for row in rows if row["oom"]}
    return {
        "out_of_memory": sorted(really),
        "recognised": sorted(really & refused),
        "missed": sorted(really - refused),
        "false_alarms": sorted(refused - really),
    }


def name_of(row: Row) -> str:
    names = (
        ("h", "hidden"),
        ("L", "layers"),
        ("a", "heads"),
        ("t", "t"),
        ("p", "p"),
        ("d", "d"),
        ("b", "microbatch"),
    )
    return f"{row['date']}, line {row['line']}: " + " ".join(f"{short}={row[name]}" for short, name in names)
