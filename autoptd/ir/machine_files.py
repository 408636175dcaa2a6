"""The machine descriptions: one TOML file each in `autoptd/machines`, with their GPUs in `gpus.toml`.

In: a name. Out: its file, and its contents, from which the solver derives a `Machine` (ir/machine.py), the
planner a `Cluster` (wings/planner/cluster.py, which explains the fields), and progress reports the peaks of a
GPU.

    # NVIDIA's own machines may also be called by the name of their GPU.
    machine_file("h100").stem                          # "dgx-h100"
    machine_of_device("NVIDIA H100 80GB HBM3")         # "dgx-h100"
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autoptd.errors import PlanError
from autoptd.ir.plan import nearest

FOLDER = Path(__file__).parents[1] / "machines"
GPUS = FOLDER / "gpus.toml"
# NVIDIA's own machines, which may also be called by the name of their GPU.
MAKER = "dgx-"
# Fields of gpus.toml that only wings/reports/progress.py reads.
OF_PROGRESS = ("device", "tf32_flops")


def machine_names() -> list[str]:
    """Return the names of all described machines, sorted."""
    return sorted(file.stem for file in FOLDER.glob("*.toml") if file != GPUS)


def machine_file(name: str) -> Path | None:
    """Return the file of a machine by its name, or by that of the GPU in one of NVIDIA's own; None for an
    unknown name.
    """
    known = machine_names()
    found = next((full for full in (name, MAKER + name) if full in known), None)
    return None if found is None else FOLDER / f"{found}.toml"


def nearest_machines(name: str) -> str:
    """Format the names most similar to `name`."""
    known = machine_names()
    short = [full.removeprefix(MAKER) for full in known if full.startswith(MAKER)]
    return nearest(name, [*known, *short])


def machine_of_device(device: str) -> str | None:
    """Return NVIDIA's own machine whose GPUs CUDA calls `device`, or None."""
    # "NVIDIA H100 80GB HBM3" contains "h100".
    own = [name for name in machine_names() if name.startswith(MAKER)]
    return next((name for name in own if name.removeprefix(MAKER) in device.lower()), None)


def read_gpus() -> dict[str, dict[str, Any]]:
    """Return the tables of gpus.toml, by the names of its GPUs."""
    return tomllib.loads(GPUS.read_text())


def gpu_of(record: Mapping[str, Any], site: str) -> Any:
    """Return the [gpu] of a machine's record: its own table, or the one of gpus.toml that it names; PlanError
    for an unknown name.
    """
    given = record.get("gpu")
    if not isinstance(given, str):
        return given
    known = read_gpus()
    if given not in known:
        raise PlanError(f"{site}: gpu={given!r}", "no such GPU", f"{nearest(given, known)}, or a table [gpu]")
    return {name: value for name, value in known[given].items() if name not in OF_PROGRESS}


__all__ = [
    "FOLDER",
    "gpu_of",
    "machine_file",
    "machine_names",
    "machine_of_device",
    "nearest_machines",
    "read_gpus",
]
