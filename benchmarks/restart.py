"""A rank is killed: seconds until the run takes its next step, and what they go to.

examples/train.py on 8 processes of one thread over gloo, t=2, p=2, d=2, under torchrun --max-restarts; a checkpoint every few
steps. When the run has saved, one rank gets SIGKILL. torchrun ends the others and starts all of them again; they load the last
complete checkpoint and go on. Each part is that of the rank on which it ends last:

- fault: from the kill until the last rank has noticed, knows who is gone, and has left its checkpointer.
- end: until the last old process is gone; torchrun, which has sent them SIGTERM, waits.
- agent: until torchrun has made the last new process.
- import: Python, torch, autoptd.
- model: the script builds its model, reads its text.
- compile: `parallelize` traces the model, plans, and makes each rank's stages.
- group: the processes find each other; the fastest waits for the slowest.
- begin: groups of each axis, and a rank's parameters.
- load: `resume`: leftovers of the save that did not end are removed, files are checked, parameters and moments read.
- step: the first one. Then the run goes on; how many steps were done again is told beside.

    python benchmarks/restart.py               # a table, benchmarks/results/restart.json and restart.svg
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.lib.report import save, save_picture

Row = dict[str, Any]
ROOT = Path(__file__).parents[1]
MESH = {"t": 2, "p": 2, "d": 2}
RANKS = 8
# The rank that is killed: in the middle of the pipeline and of its groups.
VICTIM = 5
# Steps between two saves, and before the kill.
EVERY, BEFORE = 10, 25
# Seconds in which a run has to come that far.
LIMIT = 600.0
# The mark that ends each part behind the first one.
PARTS = {
    "agent": "made",
    "import": "imported",
    "model": "parallelize begins",
    "compile": "group begins",
    "group": "group ends",
    "begin": "parallelize ends",
    "load": "resume ends",
    "step": "step",
}
ALL_PARTS = ("fault", "end", *PARTS)


def start(root: Path, sizes: list[str]) -> subprocess.Popen[bytes]:
    """Start torchrun, which starts the ranks."""
    (root / "marks").mkdir(parents=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "1"]
    command += ["--nproc-per-node", str(RANKS), "--", str(ROOT / "benchmarks" / "lib" / "marked_train.py")]
    command += [str(root / "marks"), *sizes, "--steps", "1000000", "--save", str(root / "ckpts"), "--resume"]
    command += ["--save-every", str(EVERY), "--out", str(root / "out")]
    for name, degree in MESH.items():
        command += [f"--{name}", str(degree)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with (root / "log").open("wb") as log:
        return subprocess.Popen(command, env=env, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)


def marks_of(root: Path, attempt: int, rank: int) -> list[Row]:
    """Return what a rank has marked; a line that is being written counts later."""
    file = root / "marks" / f"{attempt}-{rank}.jsonl"
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return [json.loads(line) for line in lines]


def last_step(root: Path, attempt: int, rank: int) -> int:
    return max((mark.get("step", 0) for mark in marks_of(root, attempt, rank)), default=0)


def wait_for_step(run: subprocess.Popen[bytes], root: Path, attempt: int, least: int) -> None:
    """Wait until all ranks have done a step; the output of the run where it ends before."""
    deadline = time.time() + LIMIT
    while min(last_step(root, attempt, rank) for rank in range(RANKS)) < least:
        if run.poll() is not None or time.time() > deadline:
            raise RuntimeError((root / "log").read_text()[-4000:])
        time.sleep(0.02)


def wait_for_end(pids: list[int]) -> float:
    """Wait until processes are gone; return when."""
    deadline = time.time() + LIMIT
    while any(is_alive(pid) for pid in pids):
        if time.time() > deadline:
            raise RuntimeError(f"processes of {pids} go on")
        time.sleep(0.01)
    return time.time()


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def one_turn(root: Path, sizes: list[str]) -> Row:
    """Run, kill, wait for the next step; the seconds of each part."""
    run = start(root, sizes)
    try:
        wait_for_step(run, root, 0, BEFORE)
        victim = marks_of(root, 0, VICTIM)[0]["pid"]
        killed = time.time()
        os.kill(victim, signal.SIGKILL)
        ended = wait_for_end([marks_of(root, 0, rank)[0]["pid"] for rank in range(RANKS)])
        wait_for_step(run, root, 1, 1)
        done = max(last_step(root, 0, rank) for rank in range(RANKS))
    finally:
        # torchrun hands it on; the ranks save, and end.
        run.terminate()
        run.wait(LIMIT)
    failed = [
        mark["at"] for rank in range(RANKS) for mark in marks_of(root, 0, rank) if mark["what"] == "failed"
    ]
    times = {"fault": max(failed, default=killed), "end": ended}
    for part, what in PARTS.items():
        times[part] = max(at_of(marks_of(root, 1, rank), what) for rank in range(RANKS))
    first = min(mark["step"] for mark in marks_of(root, 1, 0) if mark["what"] == "step")
    row: Row = {"again": done - first + 1, "total": times["step"] - killed}
    before = killed
    for part, at in times.items():
        row[part], before = at - before, at
    return row


def at_of(marks: list[Row], what: str) -> float:
    """Return when a rank has first come to a mark."""
    return float(next(mark["at"] for mark in marks if mark["what"] == what))


def measure(turns: int, sizes: list[str], folder: Path | None) -> Row:
    rows = []
    for turn in range(turns):
        root = Path(tempfile.mkdtemp(dir=folder))
        try:
            rows.append(one_turn(root, sizes))
        finally:
            shutil.rmtree(root)
        print(f"turn {turn}: {rows[-1]['total']:.2f} s", flush=True)
    medians = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    return {"ranks": RANKS, "mesh": MESH, "sizes": sizes, "median": medians, "turns": rows}


def show(found: Row) -> None:
    row = found["median"]
    print(f"{found['ranks']} processes, torch {torch.__version__}: median of {len(found['turns'])}")
    for part in ALL_PARTS:
        print(f"  {part:<10}{row[part]:>8.2f} s{row[part] / row['total']:>8.0%}")
    print(f"  {'total':<10}{row['total']:>8.2f} s, and {row['again']:g} steps are done again")


def picture(found: Row) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 1.6), layout="constrained")
    axes, left = figure.subplots(), 0.0
    for part in ALL_PARTS:
        width = found["median"][part]
        axes.barh([""], [width], left=left, label=f"{part} {width:.1f} s")
        left += width
    axes.set_xlabel("seconds from the kill of a rank to the end of the next step")
    axes.legend(
        ncols=len(ALL_PARTS), fontsize=7, loc="upper center", bbox_to_anchor=(0.5, 1.5), frameon=False
    )
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--folder", type=Path, help="where checkpoints are written; a temporary folder")
    args = parser.parse_args()
    found = measure(args.turns, ["--layers", str(args.layers), "--hidden", str(args.hidden)], args.folder)
    show(found)
    save("restart", found)
    save_picture("restart", picture(found))


if __name__ == "__main__":
    main()
