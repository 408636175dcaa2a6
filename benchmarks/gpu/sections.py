"""The sections, in order of value, and how each is run: as a process of its own, with a deadline; checks in several at once.

A process that crashes, hangs or breaks its device takes at most the row along that it was at: its rows are in the
section's file as they are known, and a new process goes on behind. `run_section` is the parent's side, `serve` the
child's.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.gpu.rows import GO_ON, NEAR_END, Journal, Row, Setting, run_rows

ROOT = Path(__file__).parents[2]
GRACE = 8.0  # seconds beyond its end that a row gets before its process is ended
PROFILE = "profile "  # begins the name of a section that profiles one model
LOG = "log.txt"
LOOKS = 0.2  # seconds between two looks at a process
WORKER = " of "  # in the name of a worker's part of a section: "right 2 of 6"
CHECKERS = 10  # processes that make checks at a time on one GPU, where no time is measured


@dataclass(frozen=True)
class Section:
    """`share` is its part of the time, in parts of those of all sections that are still to come.

    `workers` processes share its rows.
    """

    name: str
    title: str
    share: float
    workers: int = 1


SECTIONS = (
    Section("right", "Right", 6, CHECKERS),
    Section("fast", "Fast", 7),
    Section("kernels", "Kernels", 3),
    Section("runtime", "Runtime", 2),
)


def rows_of(section: str) -> list[Row]:
    """The rows of a section, or of a worker's part; its module is imported for that."""
    if WORKER in section:
        name, number, _, workers = section.rsplit(maxsplit=3)
        return rows_of(name)[int(number) - 1 :: int(workers)]
    if section.startswith(PROFILE):
        return importlib.import_module("benchmarks.gpu.profile").rows(section.removeprefix(PROFILE))  # type: ignore[no-any-return]
    module = section if "." in section else f"benchmarks.gpu.{section}"
    rows: list[Row] = importlib.import_module(module).ROWS
    return rows


def seconds_of(chosen: list[Section], seconds: float) -> float:
    """The seconds of the first of the sections: what others leave goes to those behind them."""
    return seconds * chosen[0].share / sum(one.share for one in chosen)


@dataclass(frozen=True)
class How:
    """`is_toy`: at toy size; `is_short`: a few rows of each section, for a test; `is_resumed`: earlier files are kept."""

    is_toy: bool
    is_short: bool = False
    is_resumed: bool = False


def run_section(section: Section, folder: Path, seconds: float, how: How) -> Journal:
    """Run a section in child processes, for `seconds` at most; return its file. Rows that are done in it are not run."""
    journal = Journal.open(folder, section.name)
    is_same = journal.content.get("is short") == how.is_short
    if (
        is_same
        and journal.content["state"] == "finished"
        and all(row["state"] in ("done", "skipped") for row in journal.rows)
    ):
        return journal
    journal.content["rows"] = [row for row in journal.rows if row["state"] in ("done", "skipped")]
    journal.content |= {"is_complete": False, "is short": how.is_short}
    journal.write()
    end = time.time() + seconds
    if section.workers == 1:
        return _run_alone(section, folder, end, how)
    names = [f"{section.name} {number + 1}{WORKER}{section.workers}" for number in range(section.workers)]
    for name in names:
        part = Journal.open(folder, name)
        part.content |= journal.content | {"section": name}
        part.write()
    with ThreadPoolExecutor(section.workers) as pool:
        parts = list(pool.map(lambda name: _run_alone(replace(section, name=name), folder, end, how), names))
    return _joined(journal, parts)


def _joined(journal: Journal, parts: Sequence[Journal]) -> Journal:
    """One file of those of a section's workers, its rows in order."""
    order = [row.name for row in rows_of(journal.content["section"])]
    found = {row["name"]: row for part in parts for row in part.rows}
    states = [part.content["state"] for part in parts]
    journal.content |= {
        "state": next((state for state in ("failed", "cut") if state in states), "finished"),
        "rows": sorted(found.values(), key=lambda row: order.index(row["name"])),
        "is_complete": all(part.content["is_complete"] for part in parts),
        "not begun": [name for part in parts for name in part.content.get("not begun", ())],
    }
    for key in ("about", "about, at the end", "why"):
        given = [part.content[key] for part in parts if part.content.get(key)]
        journal.content |= {key: given[-1]} if given else {}
    journal.write()
    for part in parts:
        part.path.unlink()
    return journal


def _run_alone(section: Section, folder: Path, end: float, how: How) -> Journal:
    """Run the rows of a section, or of a worker's part, one after the other until `end`."""
    journal = Journal.open(folder, section.name)
    while end - time.time() > NEAR_END:
        status = _watch(section, folder, end, how)
        journal = Journal.open(folder, section.name)
        is_complete = journal.content[
            "is_complete"
        ]  # said at its very end: how it leaves does not matter then
        if status == 0 or is_complete:
            journal.content["state"] = "finished" if is_complete else "cut"
            break
        why = "its time was up" if status is None else f"its process ended with {_told(status)}"
        hit = journal.end_running("cut" if status is None else "failed", why)
        if status not in (GO_ON, None) and not hit:  # it died between rows: again would be the same
            journal.content |= {"state": "failed", "why": f"{why}, at no row"}
            break
        journal.content["state"] = "cut"
    journal.end_running("cut", "the section's time was up")
    journal.write()
    return journal


def _told(status: int) -> str:
    return f"signal {-status}" if status < 0 else f"status {status}"


def _watch(section: Section, folder: Path, end: float, how: How) -> int | None:
    """Run one child until it ends, or until its row (or the section) has no time left: None. What it prints goes to log.txt."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.gpu",
        "--child",
        section.name,
        "--out",
        str(folder),
        "--end",
        str(end),
    ]
    command += ["--toy"] * how.is_toy + ["--short"] * how.is_short
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    if how.is_toy:
        environment["TRITON_INTERPRET"] = "1"
    with (
        (folder / LOG).open("a") as log,
        subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
        ) as child,
    ):
        try:
            while child.poll() is None:
                time.sleep(LOOKS)
                if time.time() > _last_moment(folder, section.name, end):
                    _end(child)
                    return None
        except BaseException:
            _end(child)
            raise
    return child.returncode


def _last_moment(folder: Path, name: str, end: float) -> float:
    """When the child must be through with what it does."""
    running = [row for row in Journal.open(folder, name).rows if row["state"] == "running"]
    return min([end, *(row["end"] + GRACE for row in running)])


def _end(child: subprocess.Popen[bytes]) -> None:
    """End the child and what it started."""
    for signal in (15, 9):
        try:
            os.killpg(child.pid, signal)
            child.wait(timeout=3.0)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def serve(name: str, folder: Path, end: float, how: How) -> int:
    """The child: run the section's rows that are not in its file."""
    import torch

    from benchmarks.gpu.device import find_device
    from benchmarks.gpu.machine import about

    torch.set_num_threads(1 if how.is_toy else min(8, os.cpu_count() or 1))
    journal = Journal.open(folder, name)
    if not journal.content["about"]:
        journal.content["about"] = about()
    journal.write()
    rows = [row for row in rows_of(name) if row.is_short or not how.is_short]
    status = run_rows(rows, Setting(find_device(), how.is_toy, folder, end), journal)
    states = [journal.state_of(row.name) for row in rows]
    journal.content |= {
        "is_complete": all(states),
        "not begun": [r.name for r in rows if not journal.state_of(r.name)],
    }
    journal.content["about, at the end"] = about()
    journal.write()
    return status
