"""Rows of a section: what is measured or checked, one after the other, each written down as soon as it is known.

A row's function gets a `Setting` and yields its findings, better ones later: each replaces the one before it in the
section's file, so that whatever ends the row early (its time, the section's, an error, a crash) leaves the last one.
A row whose file says "done" is not run again.

    def softmax(setting: Setting) -> Iterator[Found]:
        yield {"us": setting.device.microseconds(...)}
    run_rows([Row("softmax", softmax, seconds=20)], setting, journal)
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from autoptd.compat import interpreter_fault
from benchmarks.gpu.device import Device

Found = dict[str, Any]
GO_ON = 75  # the status of a process whose device is broken: the next rows want a new one
NEAR_END = 3.0  # seconds that are left to write down and leave


@dataclass(frozen=True)
class Setting:
    """What a row runs on. `is_toy`: small sizes, for machines without CUDA. `end` is when its time is up, by `time.time()`."""

    device: Device
    is_toy: bool
    folder: Path
    end: float = float("inf")

    def left(self) -> float:
        return self.end - time.time() - NEAR_END

    @property
    def where(self) -> str:
        return self.device.name


@dataclass(frozen=True)
class Row:
    """`seconds` it may take at most, `gigabytes` are about what it allocates on the device. `is_short`: part of the toy run."""

    name: str
    run: Callable[[Setting], Iterator[Found]]
    seconds: float = 60.0
    gigabytes: float = 0.0
    is_short: bool = True


class SkipRow(Exception):
    """The row cannot be had here, and why."""


@dataclass
class Journal:
    """The file of a section: {"section", "state", "about", "rows": [{"name", "state", "seconds", ...}]}."""

    path: Path
    content: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: Path, section: str) -> Journal:
        """The file that is there, else a new one."""
        path = folder / f"{section.replace(' ', '_')}.json"
        if path.is_file():
            return cls(path, json.loads(path.read_text()))
        return cls(path, {"section": section, "state": "not run", "about": {}, "rows": []})

    def write(self) -> None:
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(self.content, indent=1, default=str) + "\n")
        os.replace(part, self.path)

    @property
    def rows(self) -> list[Found]:
        return self.content["rows"]  # type: ignore[no-any-return]

    def state_of(self, name: str) -> str:
        return next((row["state"] for row in self.rows if row["name"] == name), "")

    def put(self, name: str, state: str, **found: Any) -> None:
        """Replace the row of this name, or add it; written at once."""
        row = {"name": name, "state": state, **found}
        places = [i for i, one in enumerate(self.rows) if one["name"] == name]
        if places:
            self.rows[places[0]] = row
        else:
            self.rows.append(row)
        self.write()

    def end_running(self, state: str, why: str) -> list[str]:
        """Whatever was running when its process ended: keep what it found."""
        found = [row for row in self.rows if row["state"] == "running"]
        for row in found:
            row |= {"state": state, "why": why}
        self.write()
        return [row["name"] for row in found]


def run_rows(rows: Sequence[Row], setting: Setting, journal: Journal) -> int:
    """Run those that are not done; the status of the process: 0, or GO_ON where a new one should run the rest."""
    for row in rows:
        if journal.state_of(row.name) in (
            "done",
            "failed",
            "skipped",
            "cut",
        ):  # earlier files were cleared of what to repeat
            continue
        if setting.left() <= 0:
            return 0
        if not _fits(row, setting, journal):
            continue
        if not _run(row, setting, journal):
            return GO_ON
        setting.device.release()
    return 0


def _fits(row: Row, setting: Setting, journal: Journal) -> bool:
    if setting.is_toy or row.gigabytes == 0.0:
        return True
    free = setting.device.free() / 1e9
    if free >= row.gigabytes:
        return True
    journal.put(
        row.name, "skipped", why=f"needs about {row.gigabytes:.0f} GB, {free:.0f} GB are free", seconds=0.0
    )
    return False


def _run(row: Row, setting: Setting, journal: Journal) -> bool:
    """Run one row; False where the device is not to be used any more by this process."""
    end = min(setting.end, time.time() + row.seconds)
    found: Found = {}
    start = time.time()
    journal.put(row.name, "running", end=end)
    own = Setting(setting.device, setting.is_toy, setting.folder, end)
    try:
        for found in row.run(own):
            found = {**found, "seconds": round(time.time() - start, 2)}
            journal.put(row.name, "running", end=end, **found)
        journal.put(row.name, "done" if found.get("ok", True) else "failed", **found)
    except SkipRow as exc:
        journal.put(row.name, "skipped", **{**found, "why": str(exc)})
    except subprocess.TimeoutExpired as exc:
        journal.put(
            row.name, "cut", **{**found, "why": f"what it started took more than {exc.timeout:.0f} s"}
        )
    except ModuleNotFoundError as exc:
        is_ours = (exc.name or "").split(".")[0] in ("autoptd", "benchmarks", "examples")
        journal.put(
            row.name, "failed" if is_ours else "skipped", **{**found, "why": f"needs a package: {exc}"}
        )
    except torch.OutOfMemoryError as exc:
        journal.put(
            row.name, "skipped", **{**found, "why": f"out of memory: {str(exc).splitlines()[0][:200]}"}
        )
    except Exception as exc:
        if fault := _interpreter_fault(exc):
            journal.put(row.name, "skipped", **{**found, "why": fault})
            return True
        text = f"{type(exc).__name__}: {exc}".strip()
        trace = "".join(traceback.format_exception(exc))[-6000:]
        journal.put(row.name, "failed", **{**found, "ok": False, "why": text[:1500], "trace": trace})
        print(f"{row.name}: {trace}", flush=True)
    del found, own  # with what they hold on the device
    return _is_usable(setting.device)


def _interpreter_fault(exc: Exception) -> str:
    """Why this is the fault of Triton's interpreter, which runs kernels at toy size, and no difference of ours."""
    cause: BaseException | None = exc  # a rank's exception is the cause of what the run raises
    while cause is not None and type(cause).__name__ != "InterpreterError":
        cause = cause.__cause__
    return interpreter_fault() if cause else ""


def _is_usable(device: Device) -> bool:
    """After an illegal access every call of CUDA fails; after a capture that failed, its random numbers do."""
    try:
        device.sync()
        torch.rand(1, device=device.name).item()
    except Exception as exc:
        print(f"  the device is not usable any more: {str(exc).splitlines()[0]}", file=sys.stderr, flush=True)
        return False
    return True
